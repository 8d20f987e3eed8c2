"""Prefix caching must be off: rows are captured while they are computed.

Symptom  AssertionError: len(request.block_hashes) >= num_full_blocks, in Scheduler.schedule().
Cause    `CacheConfig.enable_prefix_caching` is on by default since vLLM 0.12.0, and the generator's
         requests carry no block hashes. With hashes it would be worse: a token that is found in
         the cache is not computed, so its hidden state is never seen.
Fix      The generator's name `CacheConfig` becomes a function that turns prefix caching off.
Remove when speculators 0.3 is no longer supported (0.4 passes the argument itself).
"""

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

from spec_compat.patching import NEEDED, Patch, Probe, moved, parameters

patch = Patch(
    module="speculators.data_generation.vllm_hidden_states_generator",
    when={"speculators": ">=0.3,<0.4", "vllm": ">=0.12"},
    upstream="vllm-project/speculators#225",
)


@patch.probe
def needed(module: ModuleType) -> Probe:
    if "enable_prefix_caching" in parameters(module.CacheConfig):
        return NEEDED
    return moved("CacheConfig has no enable_prefix_caching")


@patch.replace("CacheConfig")
def cache_config(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    @wraps(original, updated=())
    def build(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **{"enable_prefix_caching": False, **kwargs})

    return build
