"""What the trainer is fed: every row of its half, whole, and once an epoch."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from spec_compat.errors import UserError
from spec_compat.pipeline.rows.index import Index
from spec_compat.pipeline.run.layout import Layout

pytestmark = pytest.mark.live

HIDDEN = 8


@pytest.fixture
def job(tmp_path: Path) -> Any:
    """Rows of two datasets, whose file numbers are the same."""
    layout = Layout(tmp_path)
    lengths = {"a": [5, 90, 3, 60, 17, 2], "b": [40, 40, 64, 11]}
    for dataset, of_rows in lengths.items():
        layout.rows(dataset).mkdir(parents=True)
        index = Index(layout.rows(dataset))
        for number, length in enumerate(of_rows):
            row = {
                "input_ids": torch.arange(length),
                "loss_mask": (torch.arange(length) % 3 > 0).long(),
                "hidden_states": [torch.full((length, HIDDEN), float(length))] * 4,
            }
            torch.save(row, layout.rows(dataset) / f"data_{number}.pt")
            index.add(f"data_{number}.pt", "0" * 64, {number: length})
    return SimpleNamespace(
        layout=layout,
        datasets=[SimpleNamespace(name=name) for name in lengths],
        config=SimpleNamespace(seed=3, val_ratio=0.1, num_workers=0),
    )


def test_every_row_is_whole_in_one_batch(job: Any) -> None:
    """E2: 0.4 looks lengths up by file number, 0.3 guesses them: one too low cuts a row off."""
    from spec_compat.pipeline.stages.loader import loader
    from spec_compat.pipeline.stages.training import split

    train, _ = split(job, 1)
    found: list[int] = []
    trained = 0
    for batch in loader(job, train, 128, 1, 0, 0):
        assert {tuple(batch[name].shape[:2]) for name in batch if name != "lengths"} == {(1, 128)}
        positions = batch["position_ids"][0]
        # The state of a row is its length: no row has another's.
        lengths = batch["verifier_last_hidden_states"][0, :, 0].int()
        for length in batch["lengths"].tolist():
            row, positions = positions[:length], positions[length:]
            assert row.tolist() == list(range(1, length + 1))
            assert set(lengths[:length].tolist()) == {length + 1}
            lengths = lengths[length:]
            found.append(length + 1)
        trained += int(batch["loss_mask"].sum())
    assert sorted(found) == sorted(row.length for row in train)
    assert trained == sum(sum(n % 3 > 0 for n in range(2, row.length)) for row in train)


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_both_halves_have_rows_and_no_row_is_in_both(
    ratio: float, world_size: int, job: Any
) -> None:
    from spec_compat.pipeline.stages.training import split

    job.config.val_ratio = ratio
    halves = split(job, world_size)
    assert all(len(half) >= world_size for half in halves)
    files = [row.file for half in halves for row in half]
    assert len(files) == len(set(files)) == 10
    assert split(job, world_size) == halves


def test_too_few_rows_for_the_processes_are_an_error(job: Any) -> None:
    from spec_compat.pipeline.stages.training import split

    with pytest.raises(UserError, match="10 rows are too few: 6 to train on and 6 to validate"):
        split(job, 6)


@pytest.mark.parametrize(("mask", "kept"), [([1, 1, 0], False), ([0, 0, 1], True), ([1], False)])
def test_a_row_is_kept_for_a_token_that_is_a_target(mask: list[int], kept: bool) -> None:
    from spec_compat.pipeline.stages.tokenization import _has_target
    from speculators.train.data import shift_batch

    numbers = torch.arange(len(mask))
    names = ("input_ids", "hidden_states", "verifier_last_hidden_states", "position_ids")
    batch = {**dict.fromkeys(names, numbers), "lengths": torch.tensor([len(mask)])}
    shifted = shift_batch({**batch, "loss_mask": torch.tensor(mask)})
    assert _has_target(np.array(mask)) is kept is bool(shifted["loss_mask"].any())
