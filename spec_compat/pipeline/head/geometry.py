"""The shape of a draft head: its widths, its tensors, its rotary embedding and its vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spec_compat.errors import UserError
from spec_compat.pipeline.inputs.verifier import Verifier

# vLLM's attention on GPUs takes heads whose size is a multiple of the first, up to the second.
HEAD_SIZES = (8, 256)


@dataclass(frozen=True)
class HeadGeometry:
    """Widths of the draft head's decoder layer; None where the verifier's config.json is silent."""

    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None

    @classmethod
    def of(cls, verifier: Verifier) -> HeadGeometry:
        """The verifier's own widths; of latent attention (MLA), those that a head adds to a token.

        Keys and queries of MLA are wider by the part that carries the position, and `head_dim`,
        where a config has it, is the width of that part alone.
        """
        text = verifier.full_text_config

        def number(key: str) -> int | None:
            value = text.get(key)
            return value if isinstance(value, int) else None

        heads = number("num_attention_heads")
        head_dim = number("v_head_dim" if number("kv_lora_rank") else "head_dim")
        head_dim = head_dim or (text["hidden_size"] // heads if heads else None)
        kv_heads = number("num_key_value_heads") or heads
        return cls(heads, kv_heads, head_dim, number("intermediate_size"))

    def check(self) -> None:
        """Raises UserError for a head that vLLM would not serve."""
        heads, kv_heads, size = self.heads, self.kv_heads, self.head_dim
        if heads and kv_heads and heads % kv_heads:
            raise UserError(
                f"{kv_heads}: {heads} heads cannot share them evenly", option="draft_kv_heads"
            )
        step, largest = HEAD_SIZES
        if size and (size % step or size > largest):
            raise UserError(
                f"{size}: vLLM's attention takes multiples of {step} up to {largest}",
                option="draft_head_dim",
            )


def expected_shapes(config: dict[str, Any]) -> dict[str, list[int]]:
    """Every tensor that vLLM's Eagle3LlamaForCausalLM takes, by the names of speculators."""
    layer = config["transformer_layer_config"]
    hidden, draft = layer["hidden_size"], config["draft_vocab_size"]
    inner, width = layer["intermediate_size"], layer["head_dim"]
    target = config.get("target_hidden_size")
    target = target if isinstance(target, int) and target else hidden
    query, key = (layer[f"num_{kind}_heads"] * width for kind in ("attention", "key_value"))
    shapes = {
        "fc.weight": [hidden, len(config["eagle_aux_hidden_state_layer_ids"]) * target],
        "embed_tokens.weight": [layer["vocab_size"], hidden],
        "norm.weight": [hidden],
        "lm_head.weight": [draft, hidden],
        "d2t": [draft],
        "t2d": [layer["vocab_size"]],
    }
    for index in range(layer["num_hidden_layers"]):
        # The first layer's attention sees the token's embedding beside the state.
        taken = hidden if index else 2 * hidden
        block = {
            "self_attn.q_proj.weight": [query, taken],
            "self_attn.k_proj.weight": [key, taken],
            "self_attn.v_proj.weight": [key, taken],
            "self_attn.o_proj.weight": [hidden, query],
            "mlp.gate_proj.weight": [inner, hidden],
            "mlp.up_proj.weight": [inner, hidden],
            "mlp.down_proj.weight": [hidden, inner],
            "input_layernorm.weight": [hidden],
            "post_attention_layernorm.weight": [hidden],
        }
        if index == 0:
            block["hidden_norm.weight"] = [hidden]
        for part, flag in (("self_attn", "attention_bias"), ("mlp", "mlp_bias")):
            if layer.get(flag):
                weights = [name for name in block if name.startswith(part)]
                block |= {n.replace(".weight", ".bias"): block[n][:1] for n in weights}
        shapes |= {f"layers.{index}.{name}": shape for name, shape in block.items()}
    return shapes


def rope(layer: Mapping[str, Any]) -> tuple[float | None, dict[str, Any] | None]:
    """Base and scaling of a layer's rotary embedding, wherever a release of transformers has them.

    The scaling is one that a Llama layer has the same of in transformers and in vLLM: None for the
    default, and without what is for images, for a part of the head or for latent attention.
    """
    written = _mapping(layer.get("rope_parameters")) or _mapping(layer.get("rope_scaling"))
    # One for each kind of layer: the head's attention is full.
    found = dict(_mapping(written.get("full_attention")) or written)
    theta = found.pop("rope_theta", None) or layer.get("rope_theta")
    kind = found.pop("type", None)
    kind = found.pop("rope_type", None) or kind
    for key in ("mrope_section", "mrope_interleaved", "partial_rotary_factor"):
        found.pop(key, None)
    if kind in (None, "default", "mrope"):
        return theta, None
    if kind == "yarn":
        # transformers would scale the attention by these two; vLLM does so for DeepSeek alone.
        for key in ("mscale", "mscale_all_dim"):
            found.pop(key, None)
        found.setdefault("original_max_position_embeddings", layer.get("max_position_embeddings"))
    return theta, {**found, "rope_type": "longrope" if kind == "su" else kind}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def mapping_problems(d2t: NDArray[Any], t2d: NDArray[Any]) -> list[str]:
    """Whether d2t, offsets from a draft id to its token, and t2d, its marks, are one mapping.

    Drafts are ordered as their tokens are: the trainer cuts the verifier's lm_head with t2d.
    """
    if int(t2d.sum()) != len(d2t):
        return [f"t2d marks {int(t2d.sum())} tokens, d2t maps {len(d2t)}"]
    wrong = np.flatnonzero(np.arange(len(d2t)) + d2t != np.flatnonzero(t2d))
    if not len(wrong):
        return []
    first = int(wrong[0])
    return [
        f"d2t and t2d disagree for {len(wrong)} of {len(d2t)} draft tokens: {first} is mapped to "
        f"{first + int(d2t[first])}, t2d has it at {int(np.flatnonzero(t2d)[first])}"
    ]
