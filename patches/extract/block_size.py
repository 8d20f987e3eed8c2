"""The size of the KV cache's blocks is for vLLM to choose.

Symptom  On a CPU: ValueError: No common block size for 16 (first in 0.29.0, whose attention wants
         multiples of 32). On a GPU: attention backends that want other blocks are passed over.
Cause    The generator asks for blocks of 16. Since vLLM 0.18.0 that is an order: before, the
         platform and the attention backend could change it.
Fix      The generator's name `CacheConfig` becomes a function that leaves `block_size` open; the
         size that vLLM chose is read from the KV cache's groups (see extract/scheduler).
Remove when the in-process generator of speculators 0.3 and 0.4 is no longer supported.
"""

from collections.abc import Callable
from functools import wraps
from inspect import unwrap
from types import ModuleType
from typing import Any

from spec_compat.patching import NEEDED, Patch, Probe, already_fixed

patch = Patch(
    module="speculators.data_generation.vllm_hidden_states_generator",
    when={"speculators": ">=0.3,<0.5", "vllm": ">=0.18"},
    after=("extract/cache-config",),
)


@patch.probe
def needed(module: ModuleType) -> Probe:
    if hasattr(unwrap(module.CacheConfig), "user_specified_block_size"):
        return NEEDED
    return already_fixed("CacheConfig does not hold to the block size that it is given")


@patch.replace("CacheConfig")
def cache_config(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    @wraps(original, updated=())
    def build(*args: Any, block_size: int | None = None, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    return build
