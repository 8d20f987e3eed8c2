"""The precision in which a draft head is trained; patches and the pipeline ask here."""

from __future__ import annotations

import os
from types import ModuleType

DTYPES = ("float32", "tf32", "bf16")


def train_dtype(torch: ModuleType) -> str:
    """What SPEC_COMPAT_TRAIN_DTYPE says; else bf16 where the GPU has it, and float32 elsewhere.

    float32: all of it. tf32: products of matrices are rounded to 10 bits of mantissa, on GPUs.
    bf16: products of matrices in bfloat16; weights, optimizer, norms, softmax and loss in float32.
    """
    asked = os.environ.get("SPEC_COMPAT_TRAIN_DTYPE")
    if not asked:
        cuda = torch.cuda
        has = cuda.is_available() and cuda.is_bf16_supported(including_emulation=False)
        return "bf16" if has else "float32"
    if asked not in DTYPES:
        raise ValueError(f"SPEC_COMPAT_TRAIN_DTYPE={asked}: one of {', '.join(DTYPES)} is needed")
    return asked
