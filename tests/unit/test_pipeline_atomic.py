"""Files and directories appear whole or not at all."""

import hashlib
from contextlib import suppress
from pathlib import Path

from spec_compat.pipeline import atomic


class Killed(BaseException):
    """As if the process were killed here."""


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    file = tmp_path / "data_0.pt"
    file.write_text("before")
    with suppress(Killed), atomic.replacing(file) as stream:
        stream.write(b"aft")
        raise Killed
    assert file.read_text() == "before"
    with atomic.replacing(file) as stream:
        stream.write(b"after")
        assert file.read_text() == "before"
    assert file.read_text() == "after"
    assert list(tmp_path.iterdir()) == [file]


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
    with atomic.replacing_directory(directory) as part:
        (part / "new").touch()
    assert [path.name for path in directory.iterdir()] == ["new"]
    assert list(tmp_path.iterdir()) == [directory]


def test_the_digest_is_sha256(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(b"x" * (atomic.CHUNK + 1))
    assert atomic.sha256(file) == hashlib.sha256(file.read_bytes()).hexdigest()
