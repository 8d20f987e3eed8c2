"""Config, tokenizer and vLLM are told the same about Python code that comes with the verifier.

Symptom  ValueError: The repository ... contains custom code which must be executed to correctly
         load the model, from the generator's constructor. For whoever does not trust that code: it
         runs all the same, in the config and in vLLM.
Cause    `AutoTokenizer.from_pretrained` is called without `trust_remote_code`, `AutoConfig` and
         vLLM's ModelConfig with True.
Fix      All three get what SPEC_COMPAT_TRUST_REMOTE_CODE says, and True where it is not set.
Remove when speculators 0.3 and 0.4 are no longer supported.
"""

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

from spec_compat.patching import NEEDED, Patch, Probe, asking_for_trust, moved, trusts_remote_code

patch = Patch(
    module="speculators.data_generation.vllm_hidden_states_generator",
    when={"speculators": ">=0.3,<0.5"},
    upstream="vllm-project/speculators#963",
)


@patch.probe
def needed(module: ModuleType) -> Probe:
    loaders = {name for name in vars(module) if name.startswith("Auto")}
    if loaders == {"AutoConfig", "AutoTokenizer"}:
        return NEEDED
    return moved(f"it loads with {sorted(loaders)}")


@patch.replace("AutoTokenizer")
def tokenizer(original: Any, module: ModuleType) -> Any:
    return asking_for_trust(original)


@patch.replace("AutoConfig")
def config(original: Any, module: ModuleType) -> Any:
    return asking_for_trust(original)


@patch.replace("ModelConfig")
def model_config(original: Any, module: ModuleType) -> Callable[..., Any]:
    @wraps(original)
    def create(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **{**kwargs, "trust_remote_code": trusts_remote_code()})

    return create
