"""Files and directories that appear whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

CHUNK = 1 << 20


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
    temporary = _temporary(path)
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
    temporary = _temporary(path)
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


def sha256(path: Path, stopped: Callable[[], bool] = lambda: False) -> str:
    """Hex digest of a file's content, or of what was read when it was stopped."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while (chunk := stream.read(CHUNK)) and not stopped():
            digest.update(chunk)
    return digest.hexdigest()


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.part")


def sync(path: Path) -> None:
    """Have the disk hold what was written to a file, or the names in a directory.

    Some network file systems do not sync directories; there the server does it by itself.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)
