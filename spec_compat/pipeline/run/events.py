"""What a stage tells the runner while it works: JSON objects, one a line, through a named pipe.

A name, unlike a file descriptor, also reaches the ranks that torchrun starts; vLLM's workers and
the loaders inherit nothing of it.
"""

from __future__ import annotations

import json
import os
import select
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

FailureKind = Literal["user", "full", "crash"]
Event = dict[str, Any]


class Events:
    """The sending end; with no path every call does nothing."""

    def __init__(self, path: Path | None = None) -> None:
        self._descriptor = None if path is None else os.open(path, os.O_WRONLY | os.O_CLOEXEC)

    def doing(self, text: str, total: int | None = None, unit: str = "rows") -> None:
        """A new step of the stage; `total` is the number of units it will take, if known."""
        self._send(event="doing", text=text, total=total, unit=unit)

    def progress(self, done: int, tokens: int | None = None, note: str = "") -> None:
        """Units done since `doing`, and tokens among them."""
        self._send(event="progress", done=done, tokens=tokens, note=note)

    def note(self, text: str) -> None:
        """One line that the user should see."""
        self._send(event="note", text=text)

    def result(self, **record: Any) -> None:
        """What goes into the manifest when the stage is done."""
        self._send(event="result", record=record)

    def failed(self, kind: FailureKind, text: str, place: Path | None = None) -> None:
        """What ended the stage; of a full disk, the directory where there was no space."""
        self._send(event="failed", kind=kind, text=text, place=place and str(place))

    def _send(self, **event: Any) -> None:
        if self._descriptor is None:
            return
        line = memoryview(json.dumps(event).encode() + b"\n")
        while line:
            line = line[os.write(self._descriptor, line) :]


class Channel:
    """The receiving end."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._rest = b""

    def receive(self, seconds: float) -> Iterator[Event]:
        """The events that have arrived, after waiting up to `seconds` for the first."""
        while select.select([self._descriptor], [], [], seconds)[0]:
            *lines, self._rest = (self._rest + os.read(self._descriptor, 1 << 16)).split(b"\n")
            for line in lines:
                yield json.loads(line)
            seconds = 0


@contextmanager
def channel() -> Iterator[Channel]:
    """A named pipe in a private directory, which is removed with all that is in it."""
    # A short name: the path of a socket, which vLLM has there, is 107 bytes at most.
    with tempfile.TemporaryDirectory(prefix="sc-", ignore_cleanup_errors=True) as directory:
        path = Path(directory, "events")
        os.mkfifo(path, 0o600)
        # Opened for both, so that it neither blocks now nor ends when a stage closes its end.
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            yield Channel(path, descriptor)
        finally:
            os.close(descriptor)
