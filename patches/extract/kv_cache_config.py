"""The KV cache is grouped by vLLM, and on a CPU it is as large as the user said.

Symptom  TypeError: get_kv_cache_config_from_groups() got an unexpected keyword 'kv_cache_specs';
         or, with the generator of 0.4 on vLLM 0.11, that it misses this argument.
         AssertionError: All attention layers in the same KV cache group must have the same
         attention spec, for a model whose layers have different numbers of KV heads.
         ValueError: Hybrid KV cache manager is disabled but failed to convert the KV cache specs to
         one unified type, for a model with Mamba layers or convolutions beside its attention.
Cause    The argument went away in vLLM 0.12.0; it says what the groups say as well. The generator
         puts all layers into one group, for which it turns sliding windows into full attention.
         On a CPU the memory that a user grants the KV cache is `VLLM_CPU_KVCACHE_SPACE`, which vLLM
         keeps in `cache_config.cpu_kvcache_space_bytes` (half of the host's memory when nothing is
         set), since 0.20.0 in `kv_cache_memory_bytes`; the generator does not ask for it.
Fix      The layers' specs stay as they are, and `get_kv_cache_groups` groups them as it does for
         vLLM's engine. The argument is dropped or added, as the installed function wants it; on a
         CPU the memory is capped by vLLM's limit.
Remove when the in-process generator of speculators 0.3 and 0.4 is no longer supported.
"""

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

from spec_compat.patching import Patch, parameters

patch = Patch(
    module="speculators.data_generation.vllm_hidden_states_generator",
    when={"speculators": ">=0.3,<0.5", "vllm": ">=0.11"},
    upstream="vllm-project/speculators#225",
)

LIMITS = ("cpu_kvcache_space_bytes", "kv_cache_memory_bytes")


@patch.replace("unify_hybrid_kv_cache_specs")
def unify(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    return lambda kv_cache_spec: None


@patch.replace("_get_kv_cache_groups_uniform_spec")
def ungrouped(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    return lambda kv_cache_spec: kv_cache_spec


@patch.replace("get_kv_cache_config_from_groups")
def kv_cache_config(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    known = parameters(original)

    @wraps(original)
    def build(
        *, vllm_config: Any, available_memory: int, kv_cache_groups: Any, **kwargs: Any
    ) -> Any:
        from vllm.v1.core.kv_cache_utils import get_kv_cache_groups

        specs = kv_cache_groups  # see ungrouped: how they are grouped depends on the configuration
        kwargs.pop("kv_cache_specs", None)
        if "kv_cache_specs" in known:
            kwargs["kv_cache_specs"] = specs
        limits = (getattr(vllm_config.cache_config, name, None) for name in LIMITS)
        return original(
            vllm_config=vllm_config,
            kv_cache_groups=get_kv_cache_groups(vllm_config, specs),
            available_memory=min([available_memory, *filter(None, limits)]),
            **kwargs,
        )

    return build
