"""The number of layers is that of the language model, wherever the config keeps it.

Symptom  ValueError: Cannot determine num_layers from config (InternVL's own repositories and
         others that say `llm_config`, `language_config` or `thinker_config`).
         ValueError: The checkpoint you are trying to load has model type `deepseek_vl_v2` but
         Transformers does not recognize this architecture, though vLLM has a config class for it.
Cause    The generator looks at `config.num_hidden_layers` and `config.text_config` only, and asks
         transformers only.
Fix      The generator's name `AutoConfig` becomes a subclass that gives the innermost text config.
         A model type that transformers does not know is looked up in vLLM.
Remove when the in-process generator of speculators 0.3 and 0.4 is no longer supported.
"""

from types import ModuleType
from typing import Any

from spec_compat.patching import Patch
from spec_compat.wrappers import text_config

patch = Patch(
    module="speculators.data_generation.vllm_hidden_states_generator",
    when={"speculators": ">=0.3,<0.5"},
    after=("extract/trust-remote-code",),
)


@patch.replace("AutoConfig")
def auto_config(original: type[Any], module: ModuleType) -> type[Any]:
    class TextConfig(original):  # type: ignore[misc]
        @classmethod
        def from_pretrained(cls, path: str, **kwargs: Any) -> Any:
            try:
                config = super().from_pretrained(path, **kwargs)
            except ValueError as error:
                config = _known_to_vllm(path, error)
            return text_config(config)

    return TextConfig


def _known_to_vllm(path: str, error: ValueError) -> Any:
    from vllm.transformers_utils.config import get_config

    try:
        return get_config(path, trust_remote_code=False)
    except Exception:
        raise error from None
