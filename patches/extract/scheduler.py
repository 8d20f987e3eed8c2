"""Scheduler needs `block_size`; a row is finished when its prefill is, not when a step is.

Symptom  TypeError: Scheduler.__init__() missing 1 required positional argument: 'block_size'.
         Silent: with more tokens in a call than the scheduler's budget (8,192), hidden states come
         back that belong to other rows, and the last rows come back short.
         AssertionError on a block size that is not that of the KV cache (first in 0.23.0).
         KeyError: UniformTypeKVCacheSpecs, where layers have different numbers of KV heads.
Cause    `block_size` is required since vLLM 0.11.1; the generator of 0.4 says 16, whatever the KV
         cache has. Since 0.11.1 chunked prefill is on as well, and the generator of 0.3 aborts
         every request of a step after that step, also one of which only a chunk was computed
         (vllm-project/speculators#279). That of 0.4 aborts none before the end, so that after 32
         rows (the limit on sequences) no further one is scheduled: RuntimeError: Request req_0_32
         not found in captured states. The specs of unequal layers are for the workers; the engine
         gives the scheduler that of one of them.
Fix      The generator's name `Scheduler` becomes a subclass: it takes the block size from the KV
         cache groups, of which it sees what the engine would let it see, and finishes a request
         once its prompt is computed and not before.
Remove when the in-process generator of speculators 0.3 and 0.4 is no longer supported.
"""

from copy import deepcopy
from math import lcm
from types import ModuleType
from typing import Any

from spec_compat.patching import Patch, parameters

patch = Patch(
    module="speculators.data_generation.vllm_hidden_states_generator",
    when={"speculators": ">=0.3,<0.5", "vllm": ">=0.11"},
    upstream="vllm-project/speculators#279",
)


@patch.replace("Scheduler")
def scheduler(original: type[Any], module: ModuleType) -> type[Any]:
    known = parameters(original)

    class PrefillScheduler(original):  # type: ignore[misc]
        def __init__(self, *, vllm_config: Any, kv_cache_config: Any, **kwargs: Any) -> None:
            kv_cache_config = _for_scheduler(kv_cache_config)
            sizes = [group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups]
            if sizes:
                vllm_config.cache_config.block_size = min(sizes)
            kwargs.update(vllm_config=vllm_config, kv_cache_config=kv_cache_config)
            kwargs.pop("block_size", None)
            if "block_size" in known:
                kwargs["block_size"] = lcm(*sizes)
            super().__init__(**kwargs)

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            computed = [
                request.request_id
                for request in self.running
                if request.num_computed_tokens >= request.num_prompt_tokens
            ]
            self.finish_requests(computed, module.RequestStatus.FINISHED_ABORTED)
            return super().schedule(*args, **kwargs)

    return PrefillScheduler


def _for_scheduler(kv_cache_config: Any) -> Any:
    """A copy in which a group of unequal layers has the spec of one of them."""
    seen = deepcopy(kv_cache_config)
    for group in seen.kv_cache_groups:
        if specs := getattr(group.kv_cache_spec, "kv_cache_specs", None):
            group.kv_cache_spec = next(iter(specs.values()))
    return seen
