"""The widths of a verifier's language model, and the layers whose states a head is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spec_compat.errors import UserError

# What no verifier can be without.
WIDTHS = ("num_hidden_layers", "hidden_size", "vocab_size")
# vLLM multiplies the context by the factor of every other kind of RoPE scaling.
UNSCALED_ROPE = ("su", "longrope", "llama3")


@dataclass(frozen=True)
class Geometry:
    """Of the language model; `max_length` is the context in tokens, None without limit."""

    num_layers: int
    hidden_size: int
    vocab_size: int
    max_length: int | None

    @property
    def default_layer_ids(self) -> tuple[int, ...]:
        return (2, self.num_layers // 2, self.num_layers - 3, self.num_layers - 1)

    def check_layer_ids(self, layer_ids: tuple[int, ...]) -> None:
        """Four different layers in ascending order, as the worker returns them by depth.

        Raises UserError.
        """
        written = ",".join(map(str, layer_ids))
        problem = None
        if len(layer_ids) != 4:
            problem = f"four ids are needed, not {len(layer_ids)}"
        elif beyond := [i for i in layer_ids if not 0 <= i < self.num_layers]:
            problem = (
                f"{beyond[0]} is out of range, the verifier has layers 0 to {self.num_layers - 1}"
            )
        elif list(layer_ids) != sorted(set(layer_ids)):
            problem = "the ids must be different and ascending"
        if problem:
            raise UserError(f"{written}: {problem}", option="layer_ids")


def max_length(text: Mapping[str, Any], tokenizer_config: Mapping[str, Any]) -> int | None:
    """The context that vLLM derives from the language model's and the tokenizer's config."""
    limits = (text.get("max_position_embeddings"), tokenizer_config.get("model_max_length"))
    known = [int(limit) for limit in limits if limit]
    if not known:
        return None
    limit = min(known)
    rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in UNSCALED_ROPE and rope.get("factor"):
        if kind == "yarn":
            limit = rope.get("original_max_position_embeddings", limit)
        limit = int(limit * rope["factor"])
    return limit
