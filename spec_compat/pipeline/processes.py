"""The processes of a stage: how they are stopped, how they ended, what they leave in memory."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

PROC, SHARED = Path("/proc"), Path("/dev/shm")  # noqa: S108
# Names that Python, torch and NCCL give to what they share; anything else there is somebody's file.
NAMES = ("psm_*", "sem.mp-*", "torch_*", "nccl-*")

# SIGHUP is what is left of a terminal or an ssh connection that has gone.
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
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
def hastened(of: set[int]) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the processes of groups; KeyboardInterrupt is raised at the end."""
    came = False

    def hasten() -> None:
        nonlocal came
        came = True
        end(of)

    before = _handle(hasten)
    try:
        yield
    finally:
        _restore(before)
    if came:
        raise KeyboardInterrupt


def check_call(command: list[str]) -> None:
    """As that of subprocess, but a Ctrl-C is the command's to answer: it ends as it likes to.

    It would hear it from the terminal, and be killed a quarter of a second later.
    """
    process = subprocess.Popen(command, start_new_session=True)
    before = _handle(lambda: process.send_signal(signal.SIGINT))
    try:
        code = process.wait()
    finally:
        _restore(before)
    if code:
        raise subprocess.CalledProcessError(code, command)


def _handle(do: Callable[[], None]) -> Handlers:
    """Have it done at these signals; returns what was done before."""

    def handler(number: int, frame: FrameType | None) -> None:
        do()

    heard = [number for number in STOPS if signal.getsignal(number) != signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in heard}


def _restore(handlers: Handlers) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


def end(of: set[int], held: Iterable[Path] = ()) -> None:
    """Kill groups, and give back their shared memory and what they held: nobody else would."""
    held = {*held, *shared_memory(of)}
    for group in of:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    for file in held:
        file.unlink(missing_ok=True)


class Status(NamedTuple):
    """A living process: its directory in /proc, its number, its parent's, and its group's."""

    path: Path
    pid: int
    parent: int
    group: int


def living() -> Iterator[Status]:
    for process in PROC.glob("[0-9]*"):
        try:
            state, parent, group = (process / "stat").read_text().rpartition(")")[2].split()[:3]
        except (OSError, ValueError):
            continue
        if state != "Z":
            yield Status(process, int(process.name), int(parent), int(group))


def groups(leader: int) -> set[int]:
    """The group of a process and those of all that descend from it: torchrun's ranks lead others.

    Those of a descendant whose parent is gone already are not among them.
    """
    every = list(living())
    family = {leader}
    while more := {p.pid for p in every if p.parent in family} - family:
        family |= more
    return {leader} | {p.group for p in every if p.pid in family}


def members(of: set[int]) -> Iterator[Status]:
    """The living processes of these groups."""
    return (process for process in living() if process.group in of)


def shared_memory(of: set[int]) -> set[Path]:
    """What the processes of these groups have mapped of /dev/shm, by the names of shared memory."""
    found = set()
    for process in members(of):
        try:
            lines = (process.path / "maps").read_text().splitlines()
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
