"""What the bars of tqdm and datasets look like to a stage, with one process and with two."""

import time
from typing import Any

import pytest
import tqdm.auto
from datasets import Dataset

from spec_compat.pipeline.system import bars

pytestmark = [pytest.mark.live]


class Told:
    """Keeps what was said, in order."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, int | None]] = []
        self.done: list[int] = []

    def doing(self, text: str, total: int | None = None) -> None:
        self.steps.append((text, total))

    def progress(self, done: int) -> None:
        self.done.append(done)


def slowly(row: dict[str, Any]) -> dict[str, Any]:
    time.sleep(0.02)
    return {"twice": 2 * row["number"]}


@pytest.mark.parametrize("processes", [1, 2])
def test_rows_that_are_mapped_are_progress(processes: int) -> None:
    rows, told = Dataset.from_dict({"number": list(range(100))}), Told()
    with bars.reported(told, "questions"):
        mapped = rows.map(slowly, num_proc=processes, load_from_cache_file=False)
    assert mapped["twice"][99] == 198
    (text, total), *_ = told.steps
    assert text.startswith("Map")
    assert text.endswith("(questions)")
    assert total == 100
    assert max(told.done) <= 100
    assert any(0 < done < 100 for done in told.done)


def test_the_newest_bar_is_shown_and_tqdm_stays_as_it_is() -> None:
    before, told = dict(vars(tqdm.std.tqdm)), Told()
    with bars.reported(told, "x"), tqdm.auto.tqdm(total=9, desc="outer") as outer:
        outer.update(4)
        time.sleep(3 * bars.POLL_SECONDS)
        with tqdm.auto.tqdm(total=5) as inner:
            inner.update(2)
            time.sleep(3 * bars.POLL_SECONDS)
    assert told.steps[:2] == [("outer (x)", 9), ("preparing (x)", 5)]
    assert {4, 2} <= set(told.done)
    after = dict(vars(tqdm.std.tqdm))
    assert {name for name in before if before[name] is not after[name]} <= {"monitor"}


def test_what_goes_wrong_in_the_block_is_raised_and_the_thread_ends() -> None:
    told = Told()
    with pytest.raises(ValueError, match="broken"), bars.reported(told, "x"):
        raise ValueError("broken")
    with tqdm.auto.tqdm(total=1):
        time.sleep(2 * bars.POLL_SECONDS)
    assert told.steps == []
