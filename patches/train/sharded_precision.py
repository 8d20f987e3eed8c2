"""With several GPUs the draft head is trained in another precision than with one.

Symptom  None: losses differ from those of one GPU. 0.3.0 computes all of it in bfloat16, norms,
         softmax and KL divergence too; 0.4 the layers so, and fc, heads and targets in float32.
Cause    `apply_fully_sharded` has a policy that casts parameters to bfloat16. 0.4 leaves it out
         where it shards the root module: `fully_shard(model)`.
Fix      The policy casts nothing: all parameters are gathered in float32, and products of matrices
         take bfloat16 by train/precision, as on one GPU.
Remove when speculators 0.3 and 0.4 are no longer supported.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from spec_compat.patching import NEEDED, Patch, Probe, moved

patch = Patch(module="speculators.train.utils", when={"speculators": ">=0.3,<0.5"})


@patch.probe
def needed(module: ModuleType) -> Probe:
    if not hasattr(module, "MixedPrecisionPolicy"):
        return moved("no policy of mixed precision is made there")
    return NEEDED


@patch.replace("MixedPrecisionPolicy")
def policy(original: Any, module: ModuleType) -> Any:
    def casting_nothing(**_: Any) -> Any:
        return original()

    return casting_nothing
