"""A request no longer carries the end token.

Symptom  TypeError: Request.__init__() got an unexpected keyword argument 'eos_token_id'.
Cause    vLLM moved it into the sampling parameters; `eos_token_id` is gone since vLLM 0.17.0.
Fix      The generator's name `Request` becomes a function that drops the argument. Nothing is lost:
         the token tells where an answer ends, and a prefill is over after one token in any case.
Remove when the in-process generator of speculators 0.3 and 0.4 is no longer supported.
"""

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

from spec_compat.patching import NEEDED, Patch, Probe, already_fixed, parameters

patch = Patch(
    module="speculators.data_generation.vllm_hidden_states_generator",
    when={"speculators": ">=0.3,<0.5", "vllm": ">=0.17"},
)


@patch.probe
def needed(module: ModuleType) -> Probe:
    if "eos_token_id" in parameters(module.Request):
        return already_fixed("Request takes eos_token_id")
    return NEEDED


@patch.replace("Request")
def request(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    @wraps(original, updated=())
    def build(*args: Any, eos_token_id: object = None, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    return build
