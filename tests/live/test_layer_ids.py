"""Captured after layer k is what vLLM serves a head under the id k + 1: bit for bit."""

from pathlib import Path

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
    states = torch.load(tmp_path / "out.pt", weights_only=True)
    assert len(states["served"]) == 3
    for captured, served in zip(states["captured"][:3], states["served"], strict=True):
        assert torch.equal(captured, served)
    assert not torch.equal(states["captured"][0], states["served"][1])
