"""Products of matrices in float32 do not use the GPU's matrix units.

Symptom  None but the time: 4,890 tokens/s where TF32 makes 30,473 (Qwen3-8B's shapes, one H200).
Cause    torch's default, `set_float32_matmul_precision("highest")`, which `Trainer` leaves.
Fix      With SPEC_COMPAT_TRAIN_DTYPE=tf32 it is "high" during the epochs, and then what it was.
Remove when speculators 0.3 and 0.4 are no longer supported.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

from spec_compat.patching import Patch
from spec_compat.precision import train_dtype

patch = Patch(
    module="speculators.train.trainer", when={"speculators": ">=0.3,<0.5"}, severity="optional"
)


@patch.replace("Trainer.train_epoch")
def train(original: Callable[..., None], module: ModuleType) -> Callable[..., None]:
    @wraps(original)
    def train_epoch(self: Any, epoch: int) -> None:
        during(module.torch, original, self, epoch)

    return train_epoch


@patch.replace("Trainer.val_epoch")
def validate(original: Callable[..., None], module: ModuleType) -> Callable[..., None]:
    @wraps(original)
    def val_epoch(self: Any, epoch: int) -> None:
        during(module.torch, original, self, epoch)

    return val_epoch


def during(torch: ModuleType, run: Callable[..., None], *args: Any) -> None:
    before = torch.get_float32_matmul_precision()
    if train_dtype(torch) == "tf32":
        torch.set_float32_matmul_precision("high")
    try:
        run(*args)
    finally:
        torch.set_float32_matmul_precision(before)
