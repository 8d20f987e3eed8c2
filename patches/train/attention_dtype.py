"""Attention under autocast gets queries and keys in float32 beside values in bfloat16.

Symptom  None but the time: products of queries and keys are computed in TF32 on a GPU. On a CPU,
         RuntimeError: Expected query, key, and value to have the same dtype.
Cause    The rotary embedding has the dtype of the residual stream, float32, and what it turns takes
         that dtype. `flex_attention` is none of the functions whose arguments autocast casts.
Fix      Queries and keys are cast to the dtype of the values.
Remove when speculators 0.3 and 0.4 are no longer supported.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

from spec_compat.patching import Patch

patch = Patch(
    module="speculators.models.eagle3.attention",
    when={"speculators": ">=0.3,<0.5"},
    severity="optional",
    after=("train/dense-attention",),
)


@patch.replace("flex_attention")
def flex_attention(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    @wraps(original)
    def attention(query: Any, key: Any, value: Any, **options: Any) -> Any:
        return original(query.to(value.dtype), key.to(value.dtype), value, **options)

    return attention
