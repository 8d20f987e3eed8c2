"""Trained on several GPUs, the head begins with norms of whatever was in the memory.

Symptom  Silent, or a loss of NaN from the first step: the RMS norms of the head's layers are scaled
         by uninitialised memory.
Cause    The trainer empties every layer before it shards it, and calls `reset_parameters` on the
         modules that have it. The linear layers have it, transformers' norms do not.
Fix      The norms of a model that is sharded get a `reset_parameters` of their own: ones.
Remove when speculators 0.3 and 0.4 are no longer supported.
"""

from collections.abc import Callable
from functools import partial, wraps
from types import ModuleType
from typing import Any

from spec_compat.patching import NEEDED, Patch, Probe, mentions, moved

patch = Patch(module="speculators.train.trainer", when={"speculators": ">=0.3,<0.5"})


@patch.probe
def needed(module: ModuleType) -> Probe:
    if "reset_parameters" in mentions(module.Trainer.setup_model):
        return NEEDED
    return moved("Trainer.setup_model does not reset what it has emptied")


@patch.replace("apply_fully_sharded")
def shard(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    @wraps(original)
    def apply_fully_sharded(model: Any) -> Any:
        for part in model.layers.modules():
            own = part._parameters
            if own and not hasattr(part, "reset_parameters"):
                if list(own) != ["weight"] or own["weight"].dim() != 1:
                    raise TypeError(f"{type(part).__name__}: how it begins is not known")
                part.reset_parameters = partial(fill, module.torch, part)
        return original(model)

    return apply_fully_sharded


def fill(torch: ModuleType, norm: Any) -> None:
    torch.nn.init.ones_(norm.weight)
