"""The decoder layers of families that differ in what wraps them and in what they return.

`scripts/zoo.py` does the same for every family, and writes docs/zoo.md.
"""

from pathlib import Path

import pytest
import torch

from tests.conftest import Script
from tests.live.zoo import LAYER_IDS, WINDOW, ZOO, extract, rows
from tests.live.zoo_oracle import layer_errors

pytestmark = [pytest.mark.live, pytest.mark.slow]

CHOSEN = (
    "Cohere", "Gemma 3, multimodal", "Llama 4", "Mistral", "MiniCPM", "Nemotron NAS", "SmolLM3",
)  # fmt: skip
REFUSED = ("Gemma 3n", "Solar")


@pytest.fixture(scope="module")
def extracted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("zoo")
    members = [ZOO[family] for family in (*CHOSEN, *REFUSED)]
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
        quiet = member.quiet and layer.layer_id == max(LAYER_IDS)
        assert quiet or layer.ours.median_token < layer.next_layer / 4, layer


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_whose_layers_hold_no_one_stream_is_refused(family: str, extracted: Path) -> None:
    member = ZOO[family]
    assert member.refusal
    assert member.refusal in (extracted / member.directory / "failure.txt").read_text()
    assert not (extracted / member.directory / "states.pt").exists()


@pytest.mark.parametrize(
    ("family", "disabled", "symptom"),
    [
        ("Qwen2.5-Omni", "extract/layer-count", "Cannot determine num_layers from config"),
        ("LLaVA", "extract/capture,extract/executor", "object has no attribute 'model'"),
    ],
)
def test_where_plain_speculators_stops(
    family: str, disabled: str, symptom: str, generate: Script, tmp_path: Path
) -> None:
    model = ZOO[family].build(tmp_path / "model")
    env = {"SPEC_COMPAT_DISABLE": disabled}
    process = generate(model, rows(), layer_ids=LAYER_IDS, max_model_len=512, env=env)
    assert process.returncode != 0
    assert symptom in process.stderr + process.stdout


def test_without_its_patch_a_window_of_all_layers_is_ignored(
    extracted: Path, generate: Script, tmp_path: Path
) -> None:
    model = extracted / ZOO["Mistral"].directory
    env = {"SPEC_COMPAT_DISABLE": "extract/sliding-window"}
    process = generate(model, rows(), layer_ids=LAYER_IDS, max_model_len=512, env=env)
    assert process.returncode == 0, process.stderr
    right = torch.load(model / "states.pt", weights_only=True)["states"]
    found = torch.load(process.states, weights_only=True)  # type: ignore[attr-defined]
    for ours, theirs in zip(found, right, strict=True):
        off = (ours[-1] - theirs[-1]).float().norm(dim=-1) / theirs[-1].float().norm(dim=-1)
        assert (off[:WINDOW] < 0.05).all()
        assert len(off) <= 2 * WINDOW or off[2 * WINDOW :].median() > 0.5


def test_layers_may_be_in_a_module_called_layers() -> None:
    """PLaMo's are, and its final norm is beside that module."""
    from spec_compat.capture.streams import Streams, find_decoder
    from torch import nn

    model, inner, holder = nn.Module(), nn.Module(), nn.Module()
    model.model, inner.layers, inner.norm = inner, holder, nn.RMSNorm(4)
    holder.layers = nn.ModuleList(nn.Identity() for _ in range(3))
    path, _, layers = find_decoder(model, 3)
    assert (path, layers) == ("Module.model.layers", holder.layers)
    assert Streams(model, [1], 3).norm(torch.full((1, 4), 2.0)).tolist() == [[1.0] * 4]


def test_a_vision_tower_is_not_taken_for_the_decoder(tmp_path: Path) -> None:
    """Its tower has as many layers; the message says where the decoder was looked for."""
    from spec_compat.capture.streams import find_decoder
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(ZOO["LLaVA"].build(tmp_path / "model"))
    path, _, layers = find_decoder(model, 8)
    assert path == "LlavaForConditionalGeneration.model.language_model"
    assert layers is model.model.language_model.layers
    del model.model.language_model.layers
    with pytest.raises(ValueError, match=r"no module with 8 decoder layers .*\.language_model"):
        find_decoder(model, 8)
