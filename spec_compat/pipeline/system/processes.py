"""The processes of a stage: how they are stopped, how they ended, what they leave in memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

SHARED = Path("/dev/shm")  # noqa: S108
# Names that Python, torch and NCCL give to what they share; anything else there is somebody's file.
NAMES = ("psm_*", "sem.mp-*", "torch_*", "nccl-*")

# In what vLLM says of a worker that raised something, which it then ends itself by SIGTERM.
TOLD_OF = "root cause"
# SIGHUP is what is left of a terminal or an ssh connection that has gone.
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
WHY = {
    signal.SIGKILL: "by hand or because memory ran out",
    signal.SIGBUS: f"as where {SHARED} is full or a mapped file was cut",
}
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


def groups(leader: int) -> set[int]:
    """The group of a process and those of all that descend from it: torchrun's ranks lead others.

    Those of a descendant whose parent is gone already are not among them.
    """
    every = {}
    for pid in psutil.pids():
        with suppress(psutil.Error, OSError):  # it has ended meanwhile, or is hidden from this user
            every[pid] = psutil.Process(pid).ppid(), os.getpgid(pid)
    family = {leader}
    while more := {pid for pid, (parent, _) in every.items() if parent in family} - family:
        family |= more
    return {leader} | {every[pid][1] for pid in family if pid in every}


def members(of: set[int]) -> Iterator[int]:
    """The processes of these groups that live: a zombie has ended."""
    for pid in psutil.pids():
        with suppress(psutil.Error, OSError):
            if os.getpgid(pid) in of and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                yield pid


def shared_memory(of: set[int]) -> set[Path]:
    """What the processes of these groups have mapped of /dev/shm, by the names of shared memory."""
    return _mapped(members(of))


def note(file: Path, of: set[int]) -> None:
    """Write down what the processes of these groups share, for when they are all killed at once."""
    there = {}
    for shared in shared_memory(of):
        with suppress(FileNotFoundError):
            there[shared.name] = shared.stat().st_ino
    with suppress(OSError):  # as on a full disk: it is for a case that may never come
        file.write_text(json.dumps(there))


def give_back(file: Path) -> int:
    """Remove what was noted, is still the same file of ours, and no living process has mapped.

    Returns the bytes of it. What is in use stays noted.
    """
    try:
        noted = dict(json.loads(file.read_text()))
    except (OSError, ValueError, TypeError):
        return 0  # none, or one that a kill has cut off
    in_use, size, left = _mapped(psutil.pids()), 0, {}
    for name, number in noted.items():
        shared = SHARED / Path(name).name
        there = shared.stat() if shared.is_file() and any(map(shared.match, NAMES)) else None
        if there is None or (there.st_ino, there.st_uid) != (number, os.getuid()):
            continue
        if shared in in_use:
            left[name] = number
            continue
        size += there.st_size
        shared.unlink(missing_ok=True)
    file.write_text(json.dumps(left)) if left else file.unlink()
    return size


def _mapped(by: Iterable[int]) -> set[Path]:
    """The shared memory that processes have mapped; psutil reads smaps for it, which is slow."""
    found = set()
    for pid in by:
        try:
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        except OSError:
            continue
        found |= {Path(line.split()[-1]) for line in lines if str(SHARED) in line}
    return {f for f in found if f.parent == SHARED and any(map(f.match, NAMES))}


def killed(number: int) -> str:
    """How a process ended that a signal ended."""
    ended_by = signal.Signals(number)
    cause = f"killed by {ended_by.name}"
    return f"{cause}, {WHY[ended_by]}" if ended_by in WHY else cause


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
