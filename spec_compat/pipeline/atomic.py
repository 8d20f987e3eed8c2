"""Files and directories that appear whole or not at all."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

CHUNK = 1 << 20
# Lines of digest and name, as `sha256sum -c` reads them.
CHECKSUMS = "SHA256SUMS"
LINE = re.compile(r"^([0-9a-f]{64})  (.+)\n", re.MULTILINE)


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
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def replacing_directory(path: Path) -> Iterator[Path]:
    """An empty directory that takes `path`'s place when the block ends without an error."""
    temporary = _temporary(path)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for file in temporary.iterdir():
            if file.is_file():
                _sync(file)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if path.exists():
        shutil.rmtree(path)
    temporary.rename(path)


def write_text(path: Path, text: str) -> None:
    with replacing(path) as stream:
        stream.write(text.encode("utf-8"))


def sha256(path: Path) -> str:
    """Hex digest of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def checksums(file: Path) -> dict[str, str]:
    """The digest of each name in a list of checksums; what is left of a cut line is skipped."""
    if not file.is_file():
        return {}
    return {name: digest for digest, name in LINE.findall(file.read_text(encoding="utf-8"))}


def is_there(file: Path) -> bool:
    """Whether a file exists, and with a list of checksums every file that it lists."""
    listed = checksums(file) if file.name == CHECKSUMS else {}
    return file.is_file() and all((file.parent / name).is_file() for name in listed)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.part")


def _sync(file: Path) -> None:
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
