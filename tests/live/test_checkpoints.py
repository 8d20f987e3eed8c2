"""Which checkpoints of a killed run are gone on with, and what is kept of its metrics."""

import json
import os
import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import spec_compat  # noqa: F401
import speculators.train.trainer  # noqa: F401  the patch comes with it
from spec_compat.patches.train import resume, whole_checkpoints
from spec_compat.pipeline.stages import checkpoints
from tests.unit.pipeline_inputs import Notes

pytestmark = [pytest.mark.live]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Three epochs that are whole, and what a kill left of the fourth."""
    for epoch in range(3):
        (tmp_path / str(epoch)).mkdir()
        for name in whole_checkpoints.FILES:
            (tmp_path / str(epoch) / name).write_text(f"{name} of {epoch}")
        whole_checkpoints._seal(tmp_path / str(epoch))
    shutil.copytree(tmp_path / "2", tmp_path / ".3.part" / "3")
    return tmp_path


def test_what_a_kill_left_is_removed_and_nothing_else(saved: Path) -> None:
    (saved / "notes").mkdir()
    assert checkpoints.drop_unfinished(saved, 4) == 3
    assert {path.name for path in saved.iterdir()} == {"0", "1", "2", "notes"}


def test_an_epoch_has_its_name_when_the_disk_has_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = list[str]()

    def fsync(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)

    def half_written(trainer: Any, epoch: int) -> None:
        directory = trainer.checkpointer.path / str(epoch)
        directory.mkdir(parents=True)
        for name in whole_checkpoints.FILES:
            (directory / name).touch()
            assert not (tmp_path / str(epoch)).exists()

    def named(part: Path, path: Path) -> Path:
        assert {*whole_checkpoints.FILES, whole_checkpoints.SUMS, "7"} == {*synced}
        assert whole_checkpoints._is_whole(part)
        os.rename(part, path)  # noqa: PTH104, that of pathlib is this one
        return path

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", named)
    checkpointer = SimpleNamespace(path=tmp_path)
    trainer = SimpleNamespace(checkpointer=checkpointer, is_distributed=False)
    whole_checkpoints.save(half_written, SimpleNamespace())(trainer, 7)  # type: ignore[arg-type]
    assert synced[-1] == tmp_path.name
    assert [path.name for path in tmp_path.iterdir()] == ["7"]
    assert checkpointer.path == tmp_path


def test_all_random_states_are_taken_back(tmp_path: Path) -> None:
    loader = SimpleNamespace(generator=torch.Generator().manual_seed(3))

    def drawn() -> list[float]:
        torches = (torch.rand(1), torch.rand(1, generator=loader.generator))
        return [random.random(), float(np.random.rand()), *map(float, torches)]

    torch.save(resume._random_state(loader), tmp_path / "state.pt")
    first, second = drawn(), drawn()
    assert not {*first} & {*second}
    resume._set_random_state(torch.load(tmp_path / "state.pt", weights_only=True), loader)
    assert drawn() == first


def test_an_epoch_that_the_run_does_not_have_is_not_gone_on_with(saved: Path) -> None:
    assert checkpoints.drop_unfinished(saved, 2) == 2
    assert {path.name for path in saved.iterdir()} == {"0", "1"}


@pytest.mark.parametrize("name", [*whole_checkpoints.FILES, whole_checkpoints.SUMS])
@pytest.mark.parametrize("spoil", ["cut", "gone", "altered"])
def test_an_epoch_with_a_file_that_is_spoilt_is_trained_again(
    name: str, spoil: str, saved: Path
) -> None:
    file = saved / "1" / name
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2] if spoil == "cut" else whole[:5] + b"!" + whole[6:])
    if spoil == "gone":
        file.unlink()
    shutil.rmtree(saved / "2")
    assert checkpoints.drop_unfinished(saved, 4) == 1
    assert {path.name for path in saved.iterdir()} == {"0"}


@pytest.mark.parametrize("lines", [0, 1])
def test_checksums_that_lack_a_file_are_none(lines: int, saved: Path) -> None:
    file = saved / "2" / whole_checkpoints.SUMS
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:lines]))
    assert checkpoints.drop_unfinished(saved, 4) == 2


def test_what_was_logged_of_epochs_that_are_trained_again_goes(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    kept = [{"epoch": 0, "step": 0}, {"epoch": 0, "step": 1}]
    lines = [json.dumps(record) for record in [*kept, {"epoch": 1, "step": 2}]]
    file.write_text("\n".join([*lines, '{"epoch": 0, "st']))
    assert checkpoints.kept_metrics(file, 1) == kept
    assert [json.loads(line) for line in file.read_text().splitlines()] == kept


@pytest.mark.parametrize(("ranks", "said"), [(2, 0), (1, 1)])
def test_another_number_of_ranks_is_said(ranks: int, said: int, saved: Path) -> None:
    for rank in range(2):
        (saved / "2" / f"random_state_{rank}.pt").touch()
    events = Notes()
    checkpoints.note_other_ranks(saved, 3, ranks, events)
    checkpoints.note_other_ranks(saved, 2, ranks, events)  # of a trainer that kept no such state
    checkpoints.note_other_ranks(saved, 0, ranks, events)
    assert len(events.notes) == said
    assert all("--train-gpus 2" in note for note in events.notes)
