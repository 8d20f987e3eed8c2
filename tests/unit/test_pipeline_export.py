"""The check between a head's weights and its config.json."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from spec_compat.pipeline import export

CONFIG = {
    "draft_vocab_size": 8,
    "eagle_aux_hidden_state_layer_ids": [3, 5, 6],
    "transformer_layer_config": {"hidden_size": 4, "vocab_size": 16},
}
SHAPES = {
    "fc.weight": [4, 12],
    "lm_head.weight": [8, 4],
    "embed_tokens.weight": [16, 4],
    "d2t": [8],
    "t2d": [16],
}


def tensors(**changes: Any) -> export.Tensors:
    return {name: {"shape": shape} for name, shape in {**SHAPES, **changes}.items()}


def test_a_head_that_fits_passes() -> None:
    export.check(CONFIG, tensors())


@pytest.mark.parametrize("name", SHAPES)
def test_a_tensor_of_another_shape_is_refused(name: str) -> None:
    with pytest.raises(RuntimeError, match=f"{name} is"):
        export.check(CONFIG, tensors(**{name: [1, 2]}))
    without = tensors()
    del without[name]
    with pytest.raises(RuntimeError, match=f"{name} is None"):
        export.check(CONFIG, without)


@pytest.mark.parametrize("ids", [None, [3, 5], [3, 5, 6, 8]])
def test_a_head_has_three_aux_layers(ids: list[int] | None) -> None:
    with pytest.raises(RuntimeError, match="not 3 layers"):
        export.check({**CONFIG, "eagle_aux_hidden_state_layer_ids": ids}, tensors())


def test_the_header_of_a_weights_file_is_read(tmp_path: Path) -> None:
    content = {"__metadata__": {"format": "pt"}, "d2t": {"dtype": "I64", "shape": [8]}}
    header = json.dumps(content).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 64)
    assert export.header(file) == {"d2t": {"dtype": "I64", "shape": [8]}}
