"""A GPU computes in float32 what it could compute in bfloat16, ten times as fast.

Symptom  None but the time: 3 % of what an H200 can do in bfloat16 on one GPU.
Cause    `Trainer` neither casts anything nor allows TF32, unless it has several GPUs; speculators
         has trained with autocast since pull request 711.
Fix      The forward runs under autocast: matrix products in bfloat16, with weights, gradients,
         optimizer and residual stream in float32. SPEC_COMPAT_TRAIN_DTYPE chooses; see
         `spec_compat.precision`. Where it is tf32, products are rounded to that during the epochs.
Remove when speculators 0.3 and 0.4 are no longer supported.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

from spec_compat.patching import NEEDED, Patch, Probe, already_fixed, mentions
from spec_compat.precision import train_dtype

patch = Patch(
    module="speculators.models.eagle3.core",
    when={"speculators": ">=0.3,<0.5"},
    upstream="vllm-project/speculators#711",
    after=("train/masked-loss", "train/eager-forward"),
)


@patch.probe
def needed(module: ModuleType) -> Probe:
    if "autocast" in mentions(module.Eagle3DraftModel.forward):
        return already_fixed("the forward runs under autocast")
    return NEEDED


@patch.replace("Eagle3DraftModel.forward")
def forward(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    torch = module.torch

    @wraps(original)
    def forward(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        bf16 = train_dtype(torch) == "bf16"
        with torch.autocast(hidden_states.device.type, torch.bfloat16, enabled=bf16):
            return original(self, hidden_states, *args, **kwargs)

    return forward
