"""How many layers a verifier has, wherever its config keeps the language model's."""

import json
from pathlib import Path
from typing import Any

import pytest

import spec_compat

pytestmark = [pytest.mark.live]

LAYERS = 5
TEXT = {"model_type": "deepseek_v2", "num_hidden_layers": LAYERS, "hidden_size": 64}


@pytest.fixture(scope="module")
def auto_config() -> Any:
    """The generator's, in which it looks for the number."""
    from speculators.data_generation import vllm_hidden_states_generator as generator

    spec_compat.require("extract/layer-count")
    return generator.AutoConfig


def written(directory: Path, config: dict[str, Any]) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_a_type_that_vllm_alone_knows(auto_config: Any, tmp_path: Path) -> None:
    vision = {"model_type": "vision", "layers": 2}
    model = {"model_type": "deepseek_vl_v2", "language_config": TEXT, "vision_config": vision}
    found = auto_config.from_pretrained(written(tmp_path, model))
    assert found.num_hidden_layers == LAYERS
    with pytest.raises(ValueError, match=r"`nobodys` but Transformers does not recognize"):
        auto_config.from_pretrained(written(tmp_path, {"model_type": "nobodys"}))


def test_a_config_within_a_config(auto_config: Any, tmp_path: Path) -> None:
    from transformers import Qwen2_5OmniThinkerConfig

    thinker = Qwen2_5OmniThinkerConfig(text_config={"num_hidden_layers": LAYERS}).to_dict()
    outer = {"model_type": "qwen2_5_omni", "thinker_config": thinker}
    assert auto_config.from_pretrained(written(tmp_path, outer)).num_hidden_layers == LAYERS
