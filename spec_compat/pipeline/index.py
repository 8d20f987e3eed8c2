"""The index of a dataset's rows: which of them are whole, and how to tell that they still are.

It lies beside the rows as `rows.index`, one line of text a row:

    number length bytes mtime_ns sha256 crc32

`length` is in tokens, `bytes` and `mtime_ns` are what stat says of the file, `sha256` is of its
content, `crc32` of the line before it. Lines are appended as rows are written, in any order; of
two with one number the later counts. A line that is cut or altered is no line: its row is missing.

A writer uses it like this; `add` may be called from several threads:

    index = Index(directory)
    for number, reason in index.check(path).items():  # a stat for each row; reads only the doubtful
        ...  # its file is gone or altered: the row is missing now
    missing = [number for number in range(rows) if number not in index]
    ...  # the row's file: temporary name, fsync, rename
    index.add(number, entry(path(number), length, sha256))  # only when the file has its name
    index.close()  # when all rows are there: in order, synced; `add` opens it again

A reader needs `Index(directory)[number].length`, or `index.lengths()` for all of them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from hashlib import sha256 as hasher
from pathlib import Path
from threading import Lock
from typing import BinaryIO, NamedTuple

from spec_compat.pipeline import atomic

NAME = "rows.index"


class Entry(NamedTuple):
    """What is known of a row's file."""

    length: int
    bytes: int
    mtime_ns: int
    sha256: str


def entry(path: Path, length: int, sha256: str) -> Entry:
    """The entry of a row whose file has just been put in place."""
    there = path.stat()
    return Entry(length, there.st_size, there.st_mtime_ns, sha256)


class Index:
    """The rows of a directory by number, an empty index where there is none yet."""

    def __init__(self, directory: Path) -> None:
        self.file = directory / NAME
        self._entries = _read(self.file)
        self._stream: BinaryIO | None = None
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, number: object) -> bool:
        return number in self._entries

    def __getitem__(self, number: int) -> Entry:
        return self._entries[number]

    def __iter__(self) -> Iterator[int]:
        """The numbers, in ascending order."""
        return iter(sorted(self._entries))

    def lengths(self) -> dict[int, int]:
        """The length in tokens of each row, in ascending order of the numbers."""
        return {number: self._entries[number].length for number in self}

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self._entries.values())

    def add(self, number: int, entry: Entry) -> None:
        """Record a row whose file is in place; one write, so that a kill leaves a line or none."""
        with self._lock:
            if self._stream is None:
                self._stream = self.file.open("ab", buffering=0)
                self._stream.write(b"\n")  # what a kill cut off must not spoil the next line
            self._stream.write(_line(number, entry))
            self._entries[number] = entry

    def remove(self, number: int) -> None:
        """Forget a row; on disk it stays until `close`, or until it is added again."""
        self._entries.pop(number, None)

    def close(self) -> None:
        """Write the index anew: sorted, each row once, synced."""
        with self._lock:
            if self._stream is not None:
                self._stream.close()
                self._stream = None
            with atomic.replacing(self.file) as stream:
                stream.writelines(_line(number, self._entries[number]) for number in self)

    def check(self, path: Callable[[int], Path], thorough: bool = False) -> dict[int, str]:
        """Remove the rows whose file is not what was written; returns them with the reason.

        A file of the recorded size and time is taken for whole; one whose time differs, as in a
        copied directory, is read. With `thorough` every file is read.
        """
        wrong = {}
        for number in list(self._entries):
            known = self._entries[number]
            if reason := fault(path(number), known, thorough):
                wrong[number] = reason
                self.remove(number)
        return wrong

    def digest(self) -> str:
        """SHA-256 over number, length and content of every row; times do not count."""
        digest = hasher()
        for number in self:
            known = self._entries[number]
            digest.update(f"{number} {known.length} {known.sha256}\n".encode())
        return digest.hexdigest()


def fault(path: Path, known: Entry, thorough: bool = False) -> str:
    """What is wrong with a row's file, empty when nothing is."""
    try:
        there = path.stat()
    except FileNotFoundError:
        return "the file is missing"
    if there.st_size != known.bytes:
        return f"it has {there.st_size:,} bytes, not {known.bytes:,}"
    if not thorough and there.st_mtime_ns == known.mtime_ns:
        return ""
    if atomic.sha256(path) != known.sha256:
        return "its checksum is not the one recorded"
    return ""


def _line(number: int, entry: Entry) -> bytes:
    line = f"{number} {entry.length} {entry.bytes} {entry.mtime_ns} {entry.sha256} ".encode()
    return b"%b%08x\n" % (line, zlib.crc32(line))


def _read(file: Path) -> dict[int, Entry]:
    entries: dict[int, Entry] = {}
    if not file.is_file():
        return entries
    with file.open("rb") as lines:
        for line in lines:
            body, crc = line[:-9], line[-9:]
            if body and crc == b"%08x\n" % zlib.crc32(body):
                number, length, size, mtime_ns, digest = body.split()
                entries[int(number)] = Entry(int(length), int(size), int(mtime_ns), digest.decode())
    return entries
