"""The decoder layers of families that differ in what wraps them and in what they return.

`scripts/zoo.py` does the same for every family, and writes docs/zoo.md.
"""

from pathlib import Path

import pytest
import torch

from tests.live.zoo import LAYER_IDS, ZOO, extract, rows
from tests.live.zoo_oracle import layer_errors

pytestmark = [pytest.mark.live, pytest.mark.slow]

CHOSEN = ("Cohere", "Gemma 3, multimodal", "Qwen3-VL", "Llama 4", "DeepSeek-V3")


@pytest.fixture(scope="module")
def extracted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("zoo")
    members = [ZOO[family] for family in (*CHOSEN, "Gemma 3n")]
    extract([member.build(directory / member.directory) for member in members])
    return directory


@pytest.mark.parametrize("family", CHOSEN)
def test_states_of_a_family_equal_hugging_face(family: str, extracted: Path) -> None:
    member = ZOO[family]
    model = extracted / member.directory
    assert not (model / "failure.txt").exists(), (model / "failure.txt").read_text()
    result = torch.load(model / "states.pt", weights_only=True)
    assert result["path"] == f"{result['name']}.{member.path}"
    assert result["reading"] == member.reading
    errors = layer_errors(model, member.oracle, rows(), LAYER_IDS, result["states"])
    assert [layer.layer_id for layer in errors] == LAYER_IDS
    for layer in errors:
        assert layer.right(experts=member.experts), layer
        assert layer.ours.median_token < layer.next_layer / 4, layer


def test_a_family_whose_layers_hold_no_one_stream_is_refused(extracted: Path) -> None:
    member = ZOO["Gemma 3n"]
    assert member.refusal
    assert member.refusal in (extracted / member.directory / "failure.txt").read_text()
    assert not (extracted / member.directory / "states.pt").exists()
