"""Rows that fail their proof: the run stops with the row's number, or leaves it out and says so."""

import json
from pathlib import Path

import pytest
from datasets import Dataset

from spec_compat.capture.orders import Written
from spec_compat.pipeline.rows.prepared import BAD_ROWS, LENGTHS, Prepared
from spec_compat.pipeline.rows.row import RowRef
from spec_compat.pipeline.rows.storage import RowFiles, Shards
from spec_compat.pipeline.rows.store import Store, stored

pytestmark = [pytest.mark.live]

REASON = "its last state gives token 5, vLLM sampled 9"
ROWS = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [1, 1]]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    rows = {"input_ids": ROWS, "loss_mask": [[1] * len(row) for row in ROWS]}
    Dataset.from_dict(rows).save_to_disk(tmp_path / "prepared")
    return Store(tmp_path / "chats", Prepared(tmp_path / "prepared"), RowFiles())


def test_by_default_the_run_stops_with_the_number_of_the_row(store: Store) -> None:
    with pytest.raises(RuntimeError, match=r"^chats row 2: its last state gives token 5"):
        store.refuse({2: REASON}, allowed=0)
    assert not list(store.directory.iterdir())


def test_with_skip_the_row_is_left_out_for_good(store: Store) -> None:
    store.refuse({2: REASON}, allowed=1)
    store.refuse({2: REASON}, allowed=1)
    assert store.missing() == [0, 1, 3]
    (step,) = store.steps([[0, 1, 2, 3]])
    assert (list(step.rows), step.keep) == ([0, 1, 2, 3], [0, 1, 3])
    store.finish({}, store.prepared.lengths)
    assert json.loads((store.directory / BAD_ROWS).read_text()) == {"2": REASON}
    assert json.loads((store.directory / LENGTHS).read_text()) == {"0": 3, "1": 2, "3": 2}
    assert Store(store.directory, store.prepared, RowFiles()).missing() == [0, 1, 3]


def test_of_a_step_with_a_missing_row_shards_are_written_anew_as_a_whole(
    store: Store,
) -> None:
    """A shard has the name of its first row; of those that are there it must keep its rows."""
    sharded = Store(store.directory, store.prepared, Shards())
    (store.directory / "shard_0.safetensors").touch()
    sharded.written(Written(str(store.directory), "shard_0.safetensors", [0, 1, 3], "0" * 64, 0))
    (step,) = sharded.steps([[0, 1, 2, 3]])
    assert (list(step.rows), step.keep) == ([0, 1, 2, 3], [0, 1, 2, 3])


def test_files_that_a_killed_writer_left_half_written_go(store: Store) -> None:
    part = store.directory / ".data_0.pt.part"
    part.touch()
    Store(store.directory, store.prepared, RowFiles())
    assert not part.exists()


def test_the_list_of_shards_that_earlier_runs_wrote_goes(store: Store) -> None:
    file = store.directory / "index.json"
    file.write_text("{}")
    Store(store.directory, store.prepared, Shards())
    assert not file.exists()


def test_what_can_be_trained_on_is_what_the_index_has_and_nobody_refused(store: Store) -> None:
    for row, length in enumerate(map(len, ROWS)):
        name = f"data_{row}.pt"
        (store.directory / name).touch()
        store.written(Written(str(store.directory), name, [row], "0" * 64, length))
    store.refuse({1: REASON}, allowed=1)
    rows = list(stored(store.directory))
    assert [row.ref for row in rows] == [RowRef("chats", number) for number in (0, 2, 3)]
    assert [row.length for row in rows] == [3, 4, 2]
    assert rows[1].file == store.directory / "data_2.pt"


def test_more_bad_rows_than_allowed_stop_the_run(store: Store) -> None:
    store.refuse({1: REASON}, allowed=1)
    with pytest.raises(RuntimeError, match="2 rows failed, --max-bad-rows is 1"):
        store.refuse({2: REASON}, allowed=1)


@pytest.mark.parametrize("spoilt", ["", '{"2": "its last', "[]", '{"x": 1}'])
def test_of_a_list_that_is_spoilt_all_rows_are_tried_again(spoilt: str, store: Store) -> None:
    (store.directory / BAD_ROWS).write_text(spoilt)
    assert Store(store.directory, store.prepared, RowFiles()).missing() == [0, 1, 2, 3]
