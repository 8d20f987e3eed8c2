"""The layout of the KV cache must be agreed on before the cache is planned.

Symptom  ValueError: KV cache layout has not been resolved yet.
Cause    Since vLLM 0.29.0 the engine core chooses one layout out of those that the workers support,
         and tells them; the generator takes the engine core's place and does not.
Fix      The generator's name `MultiprocExecutor` becomes a subclass that does it where the engine
         core does: when the workers have said what they cache. Since 0.33.0 they are told with it
         how context parallelism interleaves.
Remove when the in-process generator of speculators 0.3 and 0.4 is no longer supported.
"""

from types import ModuleType
from typing import Any

from spec_compat.patching import NEEDED, Patch, Probe, moved, parameters

patch = Patch(
    module="speculators.data_generation.vllm_hidden_states_generator",
    when={"speculators": ">=0.3,<0.5", "vllm": ">=0.29"},
    after=("extract/executor",),
)


@patch.probe
def needed(module: ModuleType) -> Probe:
    if hasattr(module.MultiprocExecutor, "set_kv_cache_layout"):
        return NEEDED
    return moved("MultiprocExecutor has no set_kv_cache_layout")


@patch.replace("MultiprocExecutor")
def executor(original: type[Any], module: ModuleType) -> type[Any]:
    class LayoutExecutor(original):  # type: ignore[misc]
        def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> Any:
            reply = super().collective_rpc(method, *args, **kwargs)
            if method == "get_kv_cache_spec":
                self._agree_on_layout([spec for specs in reply for spec in specs.values()])
            return reply

        def _agree_on_layout(self, specs: list[Any]) -> None:
            from vllm.v1.attention.backends.utils import resolve_kv_cache_layout

            supported = self.get_supported_kv_cache_layouts()
            self._layout = resolve_kv_cache_layout(self.vllm_config, supported, specs).name
            told = (self._layout, self.vllm_config.parallel_config.cp_kv_cache_interleave_size)
            self.set_kv_cache_layout(*told[: len(parameters(original.set_kv_cache_layout)) - 1])

        def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
            for config in kv_cache_configs:
                config.kv_cache_layout = self._layout
            super().initialize_from_config(kv_cache_configs)

    return LayoutExecutor
