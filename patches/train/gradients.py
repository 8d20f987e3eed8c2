"""The gradients of a step stay in memory during the forward pass of the next.

Symptom  None but the memory: 1.6 GB for the shapes of Qwen3-8B.
Cause    `train_epoch` calls `zero_grad` between the forward and the backward pass.
Fix      It is called before the forward pass as well.
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
    after=("train/fused-optimizer", "train/late-metrics", "train/tf32"),
)


@patch.probe
def needed(module: ModuleType) -> Probe:
    if "zero_grad" in mentions(module.Trainer.train_epoch):
        return NEEDED
    return moved("Trainer.train_epoch does not call zero_grad")


@patch.replace("Trainer.train_epoch")
def train(original: Callable[..., None], module: ModuleType) -> Callable[..., None]:
    @wraps(original)
    def train_epoch(self: Any, epoch: int) -> None:
        hook = self.model.register_forward_pre_hook(lambda *_: self.opt.zero_grad())
        try:
            original(self, epoch)
        finally:
            hook.remove()

    return train_epoch
