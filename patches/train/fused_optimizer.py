"""The optimizer goes through the weights several times.

Symptom  None but the time: AdamW takes 5.6 ms of a step of 64 (speculators issue 425).
Cause    `setup_optimizer` makes it without `fused=True`.
Fix      Where all parameters are on a GPU the optimizer is fused: one pass, the same arithmetic.
Remove when speculators 0.3 and 0.4 are no longer supported.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

from spec_compat.patching import NEEDED, Patch, Probe, mentions, moved

patch = Patch(
    module="speculators.train.trainer",
    when={"speculators": ">=0.3,<0.5"},
    severity="optional",
    after=("train/tf32",),
)


@patch.probe
def needed(module: ModuleType) -> Probe:
    if "AdamW" in mentions(module.Trainer.setup_optimizer):
        return NEEDED
    return moved("Trainer.setup_optimizer makes no AdamW")


@patch.replace("Trainer.train_epoch")
def train(original: Callable[..., None], module: ModuleType) -> Callable[..., None]:
    @wraps(original)
    def train_epoch(self: Any, epoch: int) -> None:
        for group in self.opt.param_groups:
            if all(parameter.is_cuda for parameter in group["params"]):
                fuse(group, self.opt.state)
        original(self, epoch)

    return train_epoch


def fuse(group: dict[str, Any], states: Any) -> None:
    """Have a group of AdamW's fused; a resumed one has its step counters on the CPU."""
    group.update(fused=True, foreach=False)
    for parameter in group["params"]:
        if "step" in states.get(parameter, ()):
            states[parameter]["step"] = states[parameter]["step"].to(parameter.device)
