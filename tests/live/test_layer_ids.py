"""Captured after layer k is what vLLM serves a head under the id k + 1: bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import run_script

pytestmark = [pytest.mark.live, pytest.mark.slow]


@pytest.mark.parametrize("verifier", ["tiny_llama", "tiny_qwen3"])
def test_a_head_is_served_the_states_it_was_trained_on(
    verifier: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    script = Path(__file__).with_name("aux_states.py")
    run_script(script, request.getfixturevalue(verifier), tmp_path / "out.pt")
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert found["supported"] == found["undone"] == [True, False]  # itself, Kimi-VL
    check_served(found)


def check_served(found: dict[str, Any]) -> None:
    """What aux_states.py saved."""
    assert len(found["served"]) == 3
    for captured, served in zip(found["captured"][:3], found["served"], strict=True):
        assert torch.equal(captured, served)
    assert not torch.equal(found["captured"][0], found["served"][1])
    assert torch.equal(found["returned"], found["without"])
