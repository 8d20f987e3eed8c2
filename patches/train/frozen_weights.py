"""Weights that are never trained are kept in float32.

Symptom  None but the memory: 1.5 GB for the shapes of Qwen3-8B.
Cause    `_setup_embeddings_and_lm_heads` converts the verifier's embeddings and lm_head, which are
         stored in bfloat16, to torch's default dtype.
Fix      Where training is in bf16 on one GPU, frozen weights that bfloat16 represents exactly are
         converted to it once they are on the GPU. Sharded ones stay: all of a group have one dtype.
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


@patch.replace("Trainer.setup_model")
def setup(original: Callable[..., None], module: ModuleType) -> Callable[..., None]:
    @wraps(original)
    def setup_model(self: Any) -> None:
        original(self)
        if train_dtype(module.torch) == "bf16" and not self.is_distributed:
            for weight in self.model.parameters():
                if weight.is_cuda and not weight.requires_grad:
                    narrow(module.torch, weight)

    return setup_model


def narrow(torch: ModuleType, weight: Any) -> None:
    narrowed = weight.data.bfloat16()
    if torch.equal(narrowed, weight.data):  # promotes: whether nothing is lost
        weight.data = narrowed
