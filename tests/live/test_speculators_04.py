"""The other line of speculators: the same rows, the same states, in the same order."""

from pathlib import Path

import pytest

from tests.conftest import Script, linked_environment
from tests.live.test_hidden_states import MAX_MODEL_LEN, assert_states, random_rows

pytestmark = [pytest.mark.live, pytest.mark.slow]

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("release", ["0.4.0", "0.4.0.1"])
def test_300_rows_in_one_call_come_back_in_order(
    release: str, generate: Script, tiny_llama: Path, tmp_path: Path
) -> None:
    packages = (f"speculators=={release}", f"spec-compat @ {ROOT.as_uri()}")
    python = linked_environment(tmp_path / "venv", *packages)
    lengths = [1 + (37 * row) % (MAX_MODEL_LEN - 1) for row in range(300)]
    rows = random_rows(lengths, 512)
    assert_states(generate, tiny_llama, rows, [5, 2, 4, 7], python=python)
