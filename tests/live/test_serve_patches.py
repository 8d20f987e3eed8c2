"""vLLM 0.16 and 0.17 serve EAGLE-3 for DeepSeek's language models once they are asked to."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests import kimi
from tests.conftest import run_script
from tests.live import zoo
from tests.live.test_layer_ids import check_served

pytestmark = [pytest.mark.live, pytest.mark.slow]

SCRIPT = Path(__file__).with_name("aux_states.py")
ENABLED = {"SPEC_COMPAT_ENABLE": "serve", **kimi.ENVIRONMENT}


@pytest.fixture(scope="module")
def tiny_deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the scaling of the attention that a layer is told of by the model around it."""
    (member,) = (member for member in zoo.TEXT_MODELS if member.family == "DeepSeek-V3")
    scaling = {"original_max_position_embeddings": 16, "beta": 0.5}
    member = replace(member, config={**member.config, "llama_4_scaling": scaling})
    return member.build(tmp_path_factory.mktemp("models") / "deepseek")


def test_without_them_vllm_does_not_take_it_for_a_verifier(mini_kimi: Path, tmp_path: Path) -> None:
    run_script(SCRIPT, mini_kimi, tmp_path / "out.pt", env=kimi.ENVIRONMENT)
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert found == {"supported": False, "Kimi-VL": False}


@pytest.mark.parametrize(
    ("verifier", "placeholder"), [("tiny_deepseek", None), ("mini_kimi", 163_605)]
)
def test_a_head_is_served_the_states_it_was_trained_on(
    verifier: str, placeholder: int | None, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    run_script(SCRIPT, request.getfixturevalue(verifier), tmp_path / "out.pt", env=ENABLED)
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert (found["supported"], found["Kimi-VL"]) == (True, True)
    assert (found["defaults"], found["placeholder"]) == ((2, 4, 5), placeholder)
    assert found["refusal"] == "EAGLE-3 states before layers (8,): there are 0 to 7"
    check_served(found)
