"""What is said when the disk does not take what it is given, and the pause until it does."""

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from spec_compat.errors import UserError
from spec_compat.pipeline.run import plan
from spec_compat.pipeline.system import disk
from tests.unit.pipeline_inputs import Notes


def test_it_pauses_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = [10.0]
    usage: Any = type("Usage", (), {"free": property(lambda self: free[0])})
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: usage())
    monkeypatch.setattr(disk, "POLL_SECONDS", 0.01)
    events = Notes()
    assert not disk.wait_for(tmp_path, 5, True, events)
    with pytest.raises(UserError, match=r"100 B are needed next, 10 B are free; make space"):
        disk.wait_for(tmp_path, 100, False, events)
    threading.Timer(0.1, lambda: free.__setitem__(0, 200.0)).start()
    assert disk.wait_for(tmp_path, 100, True, events)
    assert [note.split(":")[0] for note in events.notes] == ["paused", "going on"]


def test_more_than_max_disk_is_refused(tmp_path: Path) -> None:
    disk.refuse_beyond(1000, tmp_path, 1000)
    disk.refuse_beyond(None, tmp_path, 1e15)
    with pytest.raises(UserError, match=r"--max-disk 1.0 kB: the rows in .* take 1.0 MB"):
        disk.refuse_beyond(1000, tmp_path, 1e6)


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (errno.ENOSPC, "no space left on device"),
        (errno.EROFS, "read-only file system"),
        (errno.EACCES, "permission denied"),
        (errno.EIO, "input/output error"),
    ],
)
def test_what_the_disk_says_is_one_line(number: int, says: str, tmp_path: Path) -> None:
    line = str(disk.as_user_error(OSError(number, "x", "/run/gen/data_0.pt"), tmp_path))
    assert line.startswith(f"/run/gen/data_0.pt: {says}; ")
    assert "the same command goes on" in line


@pytest.mark.parametrize("number", [errno.ENOTDIR, errno.EISDIR, errno.EEXIST])
def test_what_lies_in_the_place_of_something_of_the_run_is_said(
    number: int, tmp_path: Path
) -> None:
    line = str(disk.as_user_error(OSError(number, "x", str(tmp_path / "gen" / "d")), tmp_path))
    assert line.startswith(f"{tmp_path}/gen/d: {os.strerror(number).lower()}; move away")
    assert disk.as_user_error(OSError(number, "x", "/somewhere/else"), tmp_path) is None


def test_other_errors_are_not_the_disks(tmp_path: Path) -> None:
    assert disk.as_user_error(ValueError("x"), tmp_path) is None
    assert str(disk.as_user_error(ValueError("x"), tmp_path / "gone")).endswith(
        "the directory is gone"
    )


def test_what_crashes_where_nothing_is_free_crashes_because_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage: Any = type("Usage", (), {"free": disk.FULL - 1})
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: usage())
    found = disk.as_user_error(RuntimeError("PytorchStreamWriter failed writing file"), tmp_path)
    assert isinstance(found, disk.Full)
    assert str(found).startswith(f"{tmp_path}: no space left on device; ")


def test_where_no_place_is_named_and_the_run_has_space_it_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A semaphore that finds no place in /dev/shm says no more than that."""
    usage: Any = type("Usage", (), {"free": disk.MORE})
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: usage())
    found = disk.as_user_error(OSError(errno.ENOSPC, "No space left on device"), tmp_path)
    assert not isinstance(found, disk.Full)
    assert f"{disk.SHARED} or " in str(found)
    usage.free -= 1
    found = disk.as_user_error(OSError(errno.ENOSPC, "No space left on device"), tmp_path)
    assert isinstance(found, disk.Full)


@pytest.mark.parametrize(
    ("number", "name", "waits"),
    [
        (errno.ENOSPC, "gen/d/data_0.pt", True),
        (errno.EDQUOT, "gen/d/data_0.pt", False),
        (errno.EACCES, "gen/d/data_0.pt", False),
        (errno.ENOSPC, "/dev/null", False),
    ],
)
def test_space_in_the_run_is_waited_for_and_nothing_else(
    number: int, name: str, waits: bool, tmp_path: Path
) -> None:
    (tmp_path / "gen").mkdir()
    found = disk.as_user_error(OSError(number, "x", str(tmp_path / name)), tmp_path)
    assert isinstance(found, UserError)
    assert isinstance(found, disk.Full) == waits
    if isinstance(found, disk.Full):
        assert found.place == tmp_path / "gen"


@pytest.mark.parametrize("source", ["/d/...jsonl", "/d/.hidden.jsonl", "/d/a b/../../x.json"])
def test_no_name_of_a_dataset_leads_out_of_the_run(source: str) -> None:
    ((dataset),) = plan.name_datasets((source,))
    assert "/" not in dataset.name
    assert not dataset.name.startswith(".")
    assert dataset.name
