"""The processes of a stage: how they are stopped, how they ended, what they leave in memory."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

PROC, SHARED = Path("/proc"), Path("/dev/shm")  # noqa: S108
# Names that Python, torch and NCCL give to what they share; anything else there is somebody's file.
NAMES = ("psm_*", "sem.mp-*", "torch_*", "nccl-*")

STOPS = (signal.SIGINT, signal.SIGTERM)
Handlers = dict[signal.Signals, Any]


@contextmanager
def stopped_once() -> Iterator[None]:
    """Ctrl-C and SIGTERM raise KeyboardInterrupt once; what comes after it does nothing.

    For a process that ends with it. What is ignored from the outset, as in the background of a
    script, stays ignored.
    """
    stopped = False

    def stop() -> None:
        nonlocal stopped
        if not stopped:
            stopped = True
            raise KeyboardInterrupt

    before = _handle(stop)
    try:
        yield
    finally:
        if not stopped:
            _restore(before)


@contextmanager
def hastened(group: int) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the processes of a group; KeyboardInterrupt is raised at the end."""
    came = False

    def hasten() -> None:
        nonlocal came
        came = True
        end(group)

    before = _handle(hasten)
    try:
        yield
    finally:
        _restore(before)
    if came:
        raise KeyboardInterrupt


def _handle(do: Callable[[], None]) -> Handlers:
    """Have it done at these signals; returns what was done before."""

    def handler(number: int, frame: FrameType | None) -> None:
        do()

    heard = [number for number in STOPS if signal.getsignal(number) != signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in heard}


def _restore(handlers: Handlers) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


def end(group: int) -> None:
    """Kill a group, and give its shared memory back: nobody else would."""
    held = shared_memory(group)
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    for file in held:
        file.unlink(missing_ok=True)


def members(group: int) -> Iterator[Path]:
    """The living processes of a group, as their directories in /proc."""
    for process in PROC.glob("[0-9]*"):
        try:
            fields = (process / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if len(fields) > 2 and fields[0] != "Z" and fields[2] == str(group):
            yield process


def shared_memory(group: int) -> set[Path]:
    """What the processes of a group have mapped of /dev/shm, by the names of shared memory."""
    found = set()
    for process in members(group):
        try:
            lines = (process / "maps").read_text().splitlines()
        except OSError:
            continue
        found |= {Path(line.split()[-1]) for line in lines if str(SHARED) in line}
    return {f for f in found if f.parent == SHARED and any(map(f.match, NAMES))}


def killed(number: int) -> str:
    """How a process ended that a signal ended."""
    cause = f"killed by {signal.Signals(number).name}"
    return f"{cause}, by hand or because memory ran out" if number == signal.SIGKILL else cause


class Children:
    """Notes which signal was the first to end a child of this process; None while there is none.

    Who waits for the child learns that it is gone, and says so; the signal is the cause.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while self.signal is None:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
            except ChildProcessError:
                ended = None
            if ended is not None and ended.si_code in (os.CLD_KILLED, os.CLD_DUMPED):
                self.signal = ended.si_status
            time.sleep(0.05)  # for its parent to take it away
