"""Rows that fail their proof: the run stops with the row's number, or leaves it out and says so."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from spec_compat.patching import BadRows
from spec_compat.pipeline import extract
from spec_compat.pipeline.rows import BAD_ROWS, LENGTHS, Prepared

pytestmark = [pytest.mark.live]

REASON = "its last state gives token 5, vLLM sampled 9"
ROWS = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [1, 1]]


class Generator:
    """Returns states as speculators' generator does, and refuses the rows that begin with `bad`."""

    layer_ids = (0, 1, 2, 3)

    class vllm_config:  # noqa: N801
        class model_config:  # noqa: N801
            dtype = torch.bfloat16

    def __init__(self, bad: set[int]) -> None:
        self.bad = bad

    def generate(self, rows: list[list[int]]) -> list[dict[str, Any]]:
        if reasons := {n: REASON for n, row in enumerate(rows) if row[0] in self.bad}:
            raise BadRows(reasons)
        return [
            {
                "input_ids": torch.tensor(row),
                "hidden_states": [torch.zeros(len(row), 8, dtype=torch.bfloat16)] * 4,
            }
            for row in rows
        ]


@pytest.fixture
def store(tmp_path: Path) -> extract.Store:
    rows = {"input_ids": ROWS, "loss_mask": [[1] * len(row) for row in ROWS]}
    Dataset.from_dict(rows).save_to_disk(tmp_path / "prepared")
    return extract.Store(tmp_path / "chats", Prepared(tmp_path / "prepared"))


def test_by_default_the_run_stops_with_the_number_of_the_row(store: extract.Store) -> None:
    with pytest.raises(RuntimeError, match=r"^chats row 2: its last state gives token 5"):
        extract._extract(Generator({6}), store, range(1, 4), allowed=0)
    assert not list(store.directory.iterdir())


def test_with_skip_the_row_is_left_out_and_those_beside_it_are_kept(store: extract.Store) -> None:
    extract._extract(Generator({6}), store, range(4), allowed=1)
    store.finish({})
    assert json.loads((store.directory / BAD_ROWS).read_text()) == {"2": REASON}
    assert set(json.loads((store.directory / LENGTHS).read_text())) == {"0", "1", "3"}
    assert not store.path(2).exists()
    assert store.path(3).exists()
    again = extract.Store(store.directory, store.prepared)
    assert again.missing() == []


def test_more_bad_rows_than_allowed_stop_the_run(store: extract.Store) -> None:
    with pytest.raises(RuntimeError, match="2 rows failed, --max-bad-rows is 1"):
        extract._extract(Generator({4, 6}), store, range(4), allowed=1)
