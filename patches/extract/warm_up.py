"""Workers must be told to warm up.

Symptom  None that is raised: random numbers are not seeded again after the model is loaded, and the
         first step pays for kernels that vLLM tunes before it serves.
Cause    Up to vLLM 0.26.0 `initialize_from_config` did it at its end; since 0.27.0 the engine core,
         whose place the generator takes, asks for it in a call of its own.
Fix      The generator's name `MultiprocExecutor` becomes a subclass that makes that call.
Remove when the in-process generator of speculators 0.3 and 0.4 is no longer supported.
"""

from types import ModuleType
from typing import Any

from spec_compat.patching import NEEDED, Patch, Probe, moved

patch = Patch(
    module="speculators.data_generation.vllm_hidden_states_generator",
    when={"speculators": ">=0.3,<0.5", "vllm": ">=0.27"},
    after=("extract/executor", "extract/kv-cache-layout"),
)


@patch.probe
def needed(module: ModuleType) -> Probe:
    if hasattr(module.MultiprocExecutor, "compile_or_warm_up_model"):
        return NEEDED
    return moved("MultiprocExecutor has no compile_or_warm_up_model")


@patch.replace("MultiprocExecutor")
def executor(original: type[Any], module: ModuleType) -> type[Any]:
    class WarmExecutor(original):  # type: ignore[misc]
        def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
            super().initialize_from_config(kv_cache_configs)
            self.compile_or_warm_up_model()

    return WarmExecutor
