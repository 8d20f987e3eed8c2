"""A model whose layers all have a sliding window is computed with it.

Symptom  Silent: from the token on that the window (4,096 in Mistral 7B v0.1, 2,047 in Phi-3 mini)
         does not reach back from, hidden states are off by more than their own size.
Cause    vLLM's engine puts the window of such a model into `CacheConfig.sliding_window`, where the
         attention layers look for it; the generator takes the engine's place and does not. (Where
         only some layers have a window, the model tells those by itself.)
Fix      The generator's name `VllmConfig` becomes a function that does what the engine does.
Remove when the in-process generator of speculators 0.3 and 0.4 is no longer supported.
"""

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

from spec_compat.patching import NEEDED, Patch, Probe, moved, parameters

patch = Patch(
    module="speculators.data_generation.vllm_hidden_states_generator",
    when={"speculators": ">=0.3,<0.5", "vllm": ">=0.11"},
    after=("extract/model-runner",),
)


@patch.probe
def needed(module: ModuleType) -> Probe:
    if "sliding_window" in parameters(module.CacheConfig):
        return NEEDED
    return moved("CacheConfig has no sliding_window")


@patch.replace("VllmConfig")
def vllm_config(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    @wraps(original, updated=())
    def build(*args: Any, **kwargs: Any) -> Any:
        config = kwargs["model_config"].hf_text_config
        if len(set(getattr(config, "layer_types", None) or ())) <= 1:
            kwargs["cache_config"].sliding_window = getattr(config, "sliding_window", None)
        return original(*args, **kwargs)

    return build
