"""What a stage tells the runner while it works: whole records over a socket.

A socket has a name, so the ranks that torchrun starts reach it too; vLLM's workers and the loaders
inherit nothing of it. A record arrives whole, however long it is and however many processes send.
When the runner is gone, sending raises: a stage never waits for a runner that no longer reads.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Client, Connection, wait
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, TypeAdapter

from spec_compat.errors import SpecCompatError

# The path of a socket has 107 bytes at most, vLLM's in the same directory included.
LONGEST_DIRECTORY, SHORT_DIRECTORY = 48, "/tmp"  # noqa: S108


class Doing(BaseModel):
    """A new step of the stage; `total` is the number of units it will take, if known."""

    event: Literal["doing"] = "doing"
    text: str
    total: int | None = None
    unit: str = "rows"


class Progress(BaseModel):
    """Units done since `Doing`, and tokens among them."""

    event: Literal["progress"] = "progress"
    done: int
    tokens: int | None = None
    note: str = ""


class Note(BaseModel):
    """One line that the user should see."""

    event: Literal["note"] = "note"
    text: str


class Failed(BaseModel):
    """What ended the stage; of a full disk, the directory where there was no space."""

    event: Literal["failed"] = "failed"
    kind: Literal["user", "full", "crash"]
    text: str
    place: Path | None = None


class Finished(BaseModel):
    """The stage's result, as its model writes it."""

    event: Literal["finished"] = "finished"
    result: dict[str, Any]


Event = Doing | Progress | Note | Failed | Finished
_EVENT: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="event")])


class RunnerGone(SpecCompatError):  # noqa: N818
    """Nobody reads what the stage sends."""


class Events:
    """The sending end; without a path nothing is sent."""

    def __init__(self, path: Path | None = None) -> None:
        self._connection: Connection[Any, Any] | None = None
        if path is not None:
            try:
                self._connection = Client(str(path), "AF_UNIX")
            except OSError as error:
                raise RunnerGone(f"{path}: {error}") from error

    def doing(self, text: str, total: int | None = None, unit: str = "rows") -> None:
        self.send(Doing(text=text, total=total, unit=unit))

    def progress(self, done: int, tokens: int | None = None, note: str = "") -> None:
        self.send(Progress(done=done, tokens=tokens, note=note))

    def note(self, text: str) -> None:
        self.send(Note(text=text))

    def send(self, event: Event) -> None:
        """Raises RunnerGone."""
        if self._connection is None:
            return
        try:
            self._connection.send_bytes(event.model_dump_json().encode())
        except OSError as error:
            raise RunnerGone(str(error)) from error


class Channel:
    """The receiving end: a socket in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "events"
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(self.path))
        self._socket.listen(128)
        self._senders: list[Connection[Any, Any]] = []

    def receive(self, seconds: float) -> Iterator[Event]:
        """The events that have arrived, after waiting up to `seconds` for the first."""
        while ready := wait([self._socket, *self._senders], seconds):
            for end in ready:
                if end is self._socket:
                    self._senders.append(Connection(self._socket.accept()[0].detach()))
                elif (event := self._read(end)) is not None:
                    yield event
            seconds = 0

    def _read(self, sender: Any) -> Event | None:
        """The next event of a sender; None when it has ended, also in the middle of one."""
        try:
            return _EVENT.validate_json(sender.recv_bytes())
        except (EOFError, OSError):
            sender.close()
            self._senders.remove(sender)
            return None

    def close(self) -> None:
        self._socket.close()
        for sender in self._senders:
            sender.close()


@contextmanager
def channel() -> Iterator[Channel]:
    """A channel in a private directory, which is removed with all that is in it."""
    short = len(os.fsencode(tempfile.gettempdir())) <= LONGEST_DIRECTORY
    place = None if short else SHORT_DIRECTORY
    with tempfile.TemporaryDirectory(
        prefix="sc-", dir=place, ignore_cleanup_errors=True
    ) as directory:
        found = Channel(Path(directory))
        try:
            yield found
        finally:
            with suppress(OSError):
                found.close()
