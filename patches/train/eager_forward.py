"""The draft head's forward is compiled, which fails without a GPU.

Symptom  torch._inductor.exc.InductorError from the first training step on a CPU.
Cause    `Eagle3DraftModel.forward` is decorated with `torch.compile`; inductor cannot compile flex
         attention for the CPU with a backward pass.
Fix      Without an accelerator the function under the decorator runs.
Remove when speculators 0.3 is no longer supported (0.4 compiles only where CUDA is available).
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

from spec_compat.patching import Patch, Probe, already_fixed, without_accelerator

patch = Patch(module="speculators.models.eagle3.core", when={"speculators": ">=0.3,<0.4"})


@patch.probe
def needed(module: ModuleType) -> Probe:
    if not hasattr(module.Eagle3DraftModel.forward, "__wrapped__"):
        return already_fixed("the forward is not compiled")
    return without_accelerator(module)


@patch.replace("Eagle3DraftModel.forward")
def forward(original: Any, module: ModuleType) -> Callable[..., Any]:
    eager: Callable[..., Any] = original.__wrapped__
    return eager
