"""A row whose states are not its own is refused, by number, whatever went wrong on the way."""

import json
from pathlib import Path

import pytest

from tests.conftest import run_script
from tests.live.planted import TEXTS

pytestmark = [pytest.mark.live, pytest.mark.slow]


@pytest.fixture(scope="module")
def refused(smollm2: Path) -> dict[str, dict[str, str]]:
    """Reasons by row for each fault planted."""
    printed = run_script(Path(__file__).with_name("planted.py"), smollm2)
    found: dict[str, dict[str, str]] = json.loads(
        next(line for line in printed.splitlines() if line[:1] == "{")
    )
    return found


def test_without_a_fault_no_row_is_refused(refused: dict[str, dict[str, str]]) -> None:
    assert refused["nothing"] == {}


@pytest.mark.parametrize("fault", ["shift", "swap", "wrong_layer"])
def test_states_of_another_place_are_refused(
    fault: str, refused: dict[str, dict[str, str]]
) -> None:
    # A position can agree by chance; a fault of the whole batch cannot hide behind it.
    assert len(refused[fault]) >= len(TEXTS) - 2
    assert all("its last state gives token" in reason for reason in refused[fault].values())


def test_the_last_row_of_a_batch_proves_itself_too(refused: dict[str, dict[str, str]]) -> None:
    assert list(refused["last_of_another"]) == [str(len(TEXTS) - 1)]


def test_states_that_are_not_finite_are_refused(refused: dict[str, dict[str, str]]) -> None:
    assert refused["not_finite"] == {str(len(TEXTS) - 1): "NaN or infinity in its states"}
