"""Rows that fail their proof: the run stops with the row's number, or leaves it out and says so."""

import json
from pathlib import Path

import pytest
from datasets import Dataset

from spec_compat.pipeline.stages import extraction as extract
from spec_compat.pipeline.rows.prepared import BAD_ROWS, LENGTHS, Prepared
from spec_compat.pipeline.rows.storage import INDEX, RowFiles, Shards

pytestmark = [pytest.mark.live]

REASON = "its last state gives token 5, vLLM sampled 9"
ROWS = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [1, 1]]


@pytest.fixture
def store(tmp_path: Path) -> extract.Store:
    rows = {"input_ids": ROWS, "loss_mask": [[1] * len(row) for row in ROWS]}
    Dataset.from_dict(rows).save_to_disk(tmp_path / "prepared")
    return extract.Store(tmp_path / "chats", Prepared(tmp_path / "prepared"), RowFiles())


def test_by_default_the_run_stops_with_the_number_of_the_row(store: extract.Store) -> None:
    with pytest.raises(RuntimeError, match=r"^chats row 2: its last state gives token 5"):
        store.refuse({2: REASON}, allowed=0)
    assert not list(store.directory.iterdir())


def test_with_skip_the_row_is_left_out_for_good(store: extract.Store) -> None:
    store.refuse({2: REASON}, allowed=1)
    store.refuse({2: REASON}, allowed=1)
    assert store.missing() == [0, 1, 3]
    (step,) = store.steps([[0, 1, 2, 3]])
    assert (list(step.rows), step.keep) == ([0, 1, 2, 3], [0, 1, 3])
    store.finish({}, store.prepared.lengths)
    assert json.loads((store.directory / BAD_ROWS).read_text()) == {"2": REASON}
    assert json.loads((store.directory / LENGTHS).read_text()) == {"0": 3, "1": 2, "3": 2}
    assert extract.Store(store.directory, store.prepared, RowFiles()).missing() == [0, 1, 3]


def test_of_a_step_with_a_missing_row_shards_are_written_anew_as_a_whole(
    store: extract.Store,
) -> None:
    """A shard has the name of its first row; of those that are there it must keep its rows."""
    sharded = extract.Store(store.directory, store.prepared, Shards())
    (store.directory / "shard_0.safetensors").touch()
    sharded.written("shard_0.safetensors", [0, 1, 3], "0" * 64)
    (step,) = sharded.steps([[0, 1, 2, 3]])
    assert (list(step.rows), step.keep) == ([0, 1, 2, 3], [0, 1, 2, 3])


def test_a_list_of_shards_beside_rows_goes(store: extract.Store) -> None:
    """It is not of this run, and the trainer would read what it names."""
    file = store.directory / INDEX
    file.write_text("{}")
    extract.Store(store.directory, store.prepared, Shards())
    assert file.exists()
    extract.Store(store.directory, store.prepared, RowFiles())
    assert not file.exists()


def test_more_bad_rows_than_allowed_stop_the_run(store: extract.Store) -> None:
    store.refuse({1: REASON}, allowed=1)
    with pytest.raises(RuntimeError, match="2 rows failed, --max-bad-rows is 1"):
        store.refuse({2: REASON}, allowed=1)


@pytest.mark.parametrize("spoilt", ["", '{"2": "its last', "[]", '{"x": 1}'])
def test_of_a_list_that_is_spoilt_all_rows_are_tried_again(
    spoilt: str, store: extract.Store
) -> None:
    (store.directory / BAD_ROWS).write_text(spoilt)
    assert extract.Store(store.directory, store.prepared, RowFiles()).missing() == [0, 1, 2, 3]
