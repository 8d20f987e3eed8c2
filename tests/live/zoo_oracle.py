"""How far extracted states are from those of Hugging Face transformers in float32."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

Rows = list[list[int]]
Layers = list[torch.Tensor]  # of one row, by layer, each [tokens, hidden]


@dataclass(frozen=True)
class Error:
    """Relative L2 errors of one layer over some rows."""

    worst_row: float
    median_token: float
    off_tokens: float  # the share of tokens that are more than 5 % off


@dataclass(frozen=True)
class LayerErrors:
    """One layer: vLLM's error, that of transformers in bf16, and how far the next layer is."""

    layer_id: int
    ours: Error
    bf16: Error
    next_layer: float

    def right(self, *, experts: bool) -> bool:
        """Whether the error is that of bf16: of rows, or of tokens where experts are chosen.

        In bf16 a near-tie in the router sends a token to another expert; vLLM's routers compute in
        bf16, those of transformers in float32.
        """
        if experts:
            few = self.ours.off_tokens <= 0.05 + 2 * self.bf16.off_tokens
            return few and self.ours.median_token <= max(0.02, 2 * self.bf16.median_token)
        return self.ours.worst_row <= max(0.02, 1.5 * self.bf16.worst_row)


def layer_errors(
    path: Path, class_name: str, rows: Rows, layer_ids: list[int], states: list[Layers]
) -> list[LayerErrors]:
    """The errors of `states`, which hold the layers `layer_ids` of each row."""
    exact = streams(path, class_name, rows, torch.float32)
    rounded = streams(path, class_name, rows, torch.bfloat16)
    result = []
    for place, layer_id in enumerate(layer_ids):
        theirs = [row[layer_id] for row in exact]
        following = layer_id + 1 if layer_id + 1 < len(exact[0]) else layer_id - 1
        result.append(
            LayerErrors(
                layer_id=layer_id,
                ours=_error([row[place] for row in states], theirs),
                bf16=_error([row[layer_id] for row in rounded], theirs),
                next_layer=min(_distance(row[following], row[layer_id]) for row in exact),
            )
        )
    return result


def streams(path: Path, class_name: str, rows: Rows, dtype: torch.dtype) -> list[Layers]:
    """The stream after each decoder layer, for each row."""
    beside = path / "oracle"
    model: Any = getattr(transformers, class_name).from_pretrained(
        beside if beside.exists() else path, dtype=dtype, attn_implementation="eager"
    )
    taken: Layers = []
    for layer in _decoder_layers(model.eval()):
        layer.register_forward_hook(lambda layer, inputs, output: taken.append(_hidden(output)))
    result = []
    with torch.inference_mode():
        for row in rows:
            taken.clear()
            # GLM-4V makes wrong positions of its own, and without a mask stumbles over given ones.
            positions = torch.arange(len(row))[None]
            mask = torch.ones_like(positions)
            ids = torch.tensor([row])
            model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False)
            result.append([stream[0] for stream in taken])
    return result


def _decoder_layers(model: Any) -> Any:
    """The longest list of layers outside a tower."""
    lists = (
        module
        for name, module in model.named_modules()
        if name.endswith("layers") and not any(t in name for t in ("vision", "visual", "audio"))
    )
    return max(lists, key=len)


def _hidden(output: Any) -> torch.Tensor:
    tensor: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return tensor


def _error(ours: Layers, theirs: Layers) -> Error:
    assert [tensor.shape for tensor in ours] == [tensor.shape for tensor in theirs]
    pairs = list(zip(ours, theirs, strict=True))
    tokens = torch.cat([(a.float() - b).norm(dim=-1) / b.norm(dim=-1) for a, b in pairs])
    return Error(
        worst_row=max(_distance(a, b) for a, b in pairs),
        median_token=float(tokens.median()),
        off_tokens=float((tokens > 0.05).float().mean()),
    )


def _distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.float() - theirs).norm() / theirs.norm())
