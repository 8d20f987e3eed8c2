"""What a wrapper around a DeepSeek language model has to offer for an EAGLE-3 head."""

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

from spec_compat.patching import NEEDED, Patch, Probe, already_fixed


def declare(patch: Patch, name: str) -> None:
    """Make `patch` give SupportsEagle3 to the wrapper class `name`, by way of its language model.

    The drafter asks the wrapper's config for `image_token_index`; it gets the placeholder of media.
    """

    def set_aux_hidden_state_layers(self: Any, layers: tuple[int, ...]) -> None:
        self.language_model.set_aux_hidden_state_layers(layers)

    def get_eagle3_aux_hidden_state_layers(self: Any) -> tuple[int, ...]:
        layers: tuple[int, ...] = self.language_model.get_eagle3_aux_hidden_state_layers()
        return layers

    offered: dict[str, object] = {
        "supports_eagle3": True,
        "has_own_lm_head": False,
        "has_own_embed_tokens": False,
        "set_aux_hidden_state_layers": set_aux_hidden_state_layers,
        "get_eagle3_aux_hidden_state_layers": get_eagle3_aux_hidden_state_layers,
    }
    for attr, value in offered.items():
        patch.provide(f"{name}.{attr}")(lambda absent, module, value=value: value)

    @patch.probe
    def needed(module: ModuleType) -> Probe:
        if hasattr(getattr(module, name), "supports_eagle3"):
            return already_fixed("the wrapper implements SupportsEagle3")
        return NEEDED

    @patch.replace(f"{name}.__init__")
    def init(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
        @wraps(original)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            original(self, *args, **kwargs)
            self.config.image_token_index = self.config.media_placeholder_token_id

        return __init__
