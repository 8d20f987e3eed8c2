"""What Hugging Face transformers says the hidden states are."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM


def relative_errors(
    model_path: Path, rows: list[list[int]], layer_ids: list[int], states: list[list[torch.Tensor]]
) -> Iterator[tuple[int, int, float]]:
    """(row, layer id, relative L2 error) for every captured tensor.

    Layer id k is the stream after layer k, Hugging Face's `hidden_states[k + 1]`; its last one has
    gone through the final norm, so the capture does too before the comparison.
    """
    verifier: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16)
    last = verifier.config.num_hidden_layers - 1
    with torch.inference_mode():
        for number, (row, captured) in enumerate(zip(rows, states, strict=True)):
            output = verifier.model(torch.tensor([row]), output_hidden_states=True)
            for layer_id, tensor in zip(layer_ids, captured, strict=True):
                assert tensor.shape == (len(row), verifier.config.hidden_size)
                assert tensor.dtype == torch.bfloat16
                ours = verifier.model.norm(tensor) if layer_id == last else tensor
                theirs = output.hidden_states[layer_id + 1][0].float()
                yield number, layer_id, float((ours.float() - theirs).norm() / theirs.norm())
