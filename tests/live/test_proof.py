"""A row whose states are not its own is refused, by number, whatever went wrong on the way."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.live, pytest.mark.slow]

ROWS = 8


@pytest.fixture(scope="module")
def refused(tiny_llama: Path) -> dict[str, dict[str, str]]:
    """Reasons by row for each fault planted."""
    script = Path(__file__).with_name("planted.py")
    process = subprocess.run(
        [sys.executable, str(script), str(tiny_llama)],
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    found: dict[str, dict[str, str]] = json.loads(
        next(line for line in process.stdout.splitlines() if line[:1] == "{")
    )
    return found


def test_without_a_fault_no_row_is_refused(refused: dict[str, dict[str, str]]) -> None:
    assert refused["nothing"] == {}


@pytest.mark.parametrize("fault", ["shift", "swap", "wrong_layer"])
def test_states_of_another_place_are_refused(
    fault: str, refused: dict[str, dict[str, str]]
) -> None:
    # One position can agree by chance; a fault of the whole batch cannot hide behind it.
    assert len(refused[fault]) >= ROWS / 2
    assert all("its last state gives token" in reason for reason in refused[fault].values())


def test_states_that_are_not_finite_are_refused(refused: dict[str, dict[str, str]]) -> None:
    assert refused["not_finite"] == {"0": "NaN or infinity in its states"}
