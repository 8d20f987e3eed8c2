"""The index of a dataset's files: which rows are whole, and how to tell that they still are.

It lies beside them as `rows.index`, one line of text a file:

    name bytes mtime_ns sha256 number:length,number:length,... crc32

`bytes` and `mtime_ns` are what stat says of the file, `sha256` is of its content; the rows that it
holds follow with their lengths in tokens; `crc32` is of the line before it. Lines are appended as
files are written, in any order; of two with one name the later counts. A line that is cut or
altered is no line: its rows are missing.

    index = Index(directory)
    for name, reason in index.check().items():  # a stat for each file; reads only the doubtful
        ...  # it is gone or altered: its rows are missing now
    missing = [number for number in range(rows) if number not in index]
    ...  # write a file: temporary name, fsync, rename
    index.add(name, sha256, {number: length, ...})  # only when the file has its name
    index.close()  # when all rows are there: in order, synced; `add` opens it again
"""

from __future__ import annotations

import gc
import hashlib
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import BinaryIO, NamedTuple

from spec_compat.pipeline.system import atomic

NAME = "rows.index"


class Entry(NamedTuple):
    """What is known of a file; `rows` has the length in tokens of each row in it."""

    bytes: int
    mtime_ns: int
    sha256: str
    rows: Mapping[int, int]


class Index:
    """The files of a directory by name, an empty index where there is none yet."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.file = directory / NAME
        self._entries: dict[str, Entry] = {}
        self._holders: dict[int, str] = {}
        with _uncollected():
            for name, entry in _read(self.file):
                self._take(name, entry)
        self._stream: BinaryIO | None = None
        self._lock = Lock()
        # Whether files had another time and the same content: `close` keeps it, and they are not
        # read again.
        self.copied = False

    def __len__(self) -> int:
        return len(self._holders)

    def __contains__(self, number: object) -> bool:
        """Whether this row is in one of the files."""
        return number in self._holders

    def __iter__(self) -> Iterator[int]:
        """The numbers of the rows, in ascending order."""
        return iter(sorted(self._holders))

    def holder(self, number: int) -> str:
        """The name of the file that holds this row."""
        return self._holders[number]

    def length(self, number: int) -> int:
        """The length in tokens of a row."""
        return self._entries[self._holders[number]].rows[number]

    @property
    def files(self) -> Mapping[str, Entry]:
        return self._entries

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self._entries.values())

    def add(self, name: str, sha256: str, rows: Mapping[int, int]) -> None:
        """Record a file that is in place; one write, so that a kill leaves a line or none."""
        there = (self.directory / name).stat()
        entry = Entry(there.st_size, there.st_mtime_ns, sha256, dict(rows))
        with self._lock:
            if self._stream is None:
                self._stream = self.file.open("ab", buffering=0)
                self._stream.write(b"\n")  # what a kill cut off must not spoil the next line
            self._stream.write(_line(name, entry))
            self._take(name, entry)

    def remove(self, name: str) -> None:
        """Forget a file; its line stays until `close`, or until it is added again."""
        for number in self._entries.pop(name).rows:
            if self._holders.get(number) == name:  # else a later file holds it
                del self._holders[number]

    def close(self) -> None:
        """Write the index anew: in the order of the rows, each file once, synced."""
        with self._lock:
            if self._stream is not None:
                self._stream.close()
                self._stream = None
            with atomic.replacing(self.file) as stream:
                stream.writelines(_line(name, self._entries[name]) for name in self._in_order())

    def check(self, thorough: bool = False) -> dict[str, str]:
        """Remove the files that are not what was written; returns them with the reason.

        A file of the recorded size and time is taken for whole; one whose time differs, as in a
        copied directory, is read. With `thorough` every file is read.
        """
        wrong = {}
        for name, entry in list(self._entries.items()):
            if reason := self._fault(name, entry, thorough):
                wrong[name] = reason
                self.remove(name)
        return wrong

    def digest(self) -> str:
        """SHA-256 over name, rows and content of every file; times do not count."""
        digest = hashlib.sha256()
        for name in self._in_order():
            entry = self._entries[name]
            digest.update(f"{name} {entry.sha256} {_rows(entry)}\n".encode())
        return digest.hexdigest()

    def _in_order(self) -> list[str]:
        return sorted(self._entries, key=lambda name: (min(self._entries[name].rows), name))

    def _take(self, name: str, entry: Entry) -> None:
        if name in self._entries:
            self.remove(name)
        self._entries[name] = entry
        self._holders.update(dict.fromkeys(entry.rows, name))

    def _fault(self, name: str, known: Entry, thorough: bool) -> str:
        there = atomic.Stamp.of(f"{self.directory}/{name}")
        if there is None:
            return "the file is missing"
        if there.bytes != known.bytes:
            return f"it has {there.bytes:,} bytes, not {known.bytes:,}"
        if not thorough and there.mtime_ns == known.mtime_ns:
            return ""
        if atomic.sha256(self.directory / name) != known.sha256:
            return "its checksum is not the one recorded"
        if there.mtime_ns != known.mtime_ns:
            self._entries[name] = known._replace(mtime_ns=there.mtime_ns)
            self.copied = True
        return ""


@contextmanager
def _uncollected() -> Iterator[None]:
    """Among millions of new entries the collector finds no garbage, again and again."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _rows(entry: Entry) -> str:
    return ",".join(f"{number}:{length}" for number, length in entry.rows.items())


def _line(name: str, entry: Entry) -> bytes:
    line = f"{name} {entry.bytes} {entry.mtime_ns} {entry.sha256} {_rows(entry)} ".encode()
    return b"%b%08x\n" % (line, zlib.crc32(line))


def _read(file: Path) -> Iterator[tuple[str, Entry]]:
    if not file.is_file():
        return
    with file.open("rb") as lines:
        for line in lines:
            body, crc = line[:-9], line[-9:]
            if body and crc == b"%08x\n" % zlib.crc32(body):
                name, size, mtime_ns, digest, rows = body.decode().split()
                if "/" in name:
                    continue  # an index that came with a run of somebody else's leads nowhere
                pairs = [pair.split(":") for pair in rows.split(",")]
                lengths = {int(number): int(length) for number, length in pairs}
                yield name, Entry(int(size), int(mtime_ns), digest, lengths)
