"""Files and directories appear whole or not at all."""

import hashlib
import os
from contextlib import suppress
from pathlib import Path

import pytest

from spec_compat import files
from spec_compat.pipeline.system import atomic


class Killed(BaseException):
    """As if the process were killed here."""


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    file = tmp_path / "data_0.pt"
    file.write_text("before")
    with suppress(Killed), atomic.replacing(file) as stream:
        stream.write(b"aft")
        raise Killed
    assert file.read_text() == "before"
    assert list(tmp_path.iterdir()) == [file]
    with atomic.replacing(file) as stream:
        stream.write(b"after")
        assert file.read_text() == "before"
    assert file.read_text() == "after"
    assert list(tmp_path.iterdir()) == [file]


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, set[str]]]:
    """What was synced: a name, its size by then, and what lay beside it."""
    found = []

    def fsync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        beside = {other.name for other in path.parent.iterdir()}
        found.append((path.name, path.stat().st_size, beside))

    monkeypatch.setattr(os, "fsync", fsync)
    return found


def test_a_file_has_its_name_when_the_disk_has_its_content(
    tmp_path: Path, synced: list[tuple[str, int, set[str]]]
) -> None:
    with atomic.replacing(tmp_path / "data_0.pt") as stream:
        stream.write(b"after")
    (name, size, beside), directory = synced
    assert (size, beside) == (5, {name})
    assert directory[0] == tmp_path.name


def test_a_directory_has_its_name_when_the_disk_has_all_of_it(
    tmp_path: Path, synced: list[tuple[str, int, set[str]]]
) -> None:
    with atomic.replacing_directory(tmp_path / "head") as part:
        (part / "below").mkdir()
        (part / "below" / "file").write_bytes(b"after")
    files, (last, _, _) = {name: size for name, size, _ in synced[:-1]}, synced[-1]
    assert files.keys() == {"below", "file", part.name}
    assert files["file"] == 5
    assert last == tmp_path.name
    assert not [name for name, _, beside in synced[:-1] if "head" in beside]


def test_a_part_is_no_sample(tmp_path: Path) -> None:
    with atomic.replacing(tmp_path / "data_0.pt"):
        (part,) = tmp_path.iterdir()
        # speculators takes every file whose name ends so for a row.
        assert not part.name.endswith("pt")


def test_a_directory_is_replaced_whole(tmp_path: Path) -> None:
    directory = tmp_path / "head"
    with atomic.replacing_directory(directory) as part:
        (part / "old").touch()
    with suppress(Killed), atomic.replacing_directory(directory) as part:
        (part / "new").touch()
        raise Killed
    assert [path.name for path in directory.iterdir()] == ["old"]
    (tmp_path / ".head.part").mkdir()
    (tmp_path / ".head.part" / "left by a kill").touch()
    with atomic.replacing_directory(directory) as part:
        (part / "new").touch()
    assert [path.name for path in directory.iterdir()] == ["new"]
    assert list(tmp_path.iterdir()) == [directory]


def test_the_digest_is_sha256(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(b"x" * (files.CHUNK + 1))
    assert atomic.sha256(file) == hashlib.sha256(file.read_bytes()).hexdigest()
