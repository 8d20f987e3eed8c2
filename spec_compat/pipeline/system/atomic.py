"""Files and directories that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

from spec_compat.files import sha256, sync

__all__ = [
    "Stamp",
    "replacing",
    "replacing_directory",
    "sha256",
    "sync",
    "temporary_of",
    "write_text",
]


class Stamp(NamedTuple):
    """Size and time of a file: while they stay, its content has stayed."""

    bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, file: Path | str) -> Stamp | None:
        """None where there is no file."""
        try:
            there = os.stat(file)  # noqa: PTH116, a million paths cost more than their stats
        except (FileNotFoundError, NotADirectoryError):
            return None
        return cls(there.st_size, there.st_mtime_ns)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A stream whose content takes `path`'s place, synced, when the block ends without an error."""
    temporary = temporary_of(path)
    try:
        with temporary.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
        sync(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def replacing_directory(path: Path) -> Iterator[Path]:
    """An empty directory that takes `path`'s place when the block ends without an error.

    A link to a directory stays one: what takes a place is what it leads to.
    """
    path = path.resolve()
    temporary = temporary_of(path)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for file in (*temporary.rglob("*"), temporary):
            sync(file)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if path.exists():
        shutil.rmtree(path)
    temporary.rename(path)
    sync(path.parent)


def write_text(path: Path, text: str) -> None:
    with replacing(path) as stream:
        stream.write(text.encode("utf-8"))


def temporary_of(path: Path) -> Path:
    """Where the content of a path lies until it is whole; a kill may leave it there."""
    return path.with_name(f".{path.name}.part")
