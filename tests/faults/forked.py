"""Stages as forks of a process that has imported everything: a killed run costs seconds.

The runner starts its stages through `Stages`, which stands in for `subprocess.Popen`. What runs is
the stage's own entry point in a process, a session and an environment of its own, as it would be
without the fork; in it `Faults` count the operations on files, and kill or fail at one of them.
"""

from __future__ import annotations

import builtins
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OPERATIONS = ("fsync", "replace", "rename", "unlink", "mkdir", "rmdir")


@dataclass
class Faults:
    """What happens in a stage: at operation `at` of its files, `do` is called with its name.

    Operations are those that change names in the run or sync its files, and each opening of one for
    writing. With `at` 0 they are only counted, into a file of `counted` by the stage's name.
    """

    run: Path
    at: int = 0
    do: Callable[[str], None] = lambda operation: None
    counted: Path | None = None
    done: int = 0

    def arm(self) -> None:
        for name in OPERATIONS:
            setattr(os, name, self._counting(getattr(os, name), name))
        opened = self._opening(builtins.open)
        builtins.open = io.open = opened

    def report(self, stage: str) -> None:
        if self.counted is not None:
            (self.counted / stage).write_text(str(self.done))

    def _counting(self, original: Any, name: str) -> Any:
        def operation(path: Any, *args: Any, **kwargs: Any) -> Any:
            if self._is_ours(path, kwargs.get("dir_fd")):
                self._count(name)
            return original(path, *args, **kwargs)

        return operation

    def _opening(self, original: Any) -> Any:
        def opening(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if mode.strip("rbt") and self._is_ours(file):
                self._count("open")
            return original(file, mode, *args, **kwargs)

        return opening

    def _is_ours(self, path: Any, directory: int | None = None) -> bool:
        """Whether a file of the run is meant, by its path or by a descriptor."""
        opened = path if isinstance(path, int) else directory
        if opened is not None:
            path = Path(f"/proc/self/fd/{opened}").readlink()
        return str(path).startswith(str(self.run))

    def _count(self, name: str) -> None:
        self.done += 1
        if self.done == self.at:
            self.do(name)


class Stages:
    """Stands in for the module `subprocess` in the runner; `faults` is for the stages begun."""

    PIPE, DEVNULL, STDOUT = subprocess.PIPE, subprocess.DEVNULL, subprocess.STDOUT
    TimeoutExpired, run = subprocess.TimeoutExpired, staticmethod(subprocess.run)

    def __init__(self, faults: Faults, groups: Path) -> None:
        self.faults = faults
        self.groups = groups

    def Popen(self, command: list[str], **options: Any) -> Forked:  # noqa: N802
        return Forked(command, self.faults, self.groups, options["stdout"], options["env"])


class Forked:
    """A stage; the part of Popen that the runner uses."""

    def __init__(
        self, command: list[str], faults: Faults, groups: Path, log: Any, env: dict[str, str]
    ) -> None:
        self.returncode: int | None = None
        self._begin, self._end = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            self._be_the_stage(command, faults, groups, log, env)
        os.close(self._begin)

    def _be_the_stage(
        self, command: list[str], faults: Faults, groups: Path, log: Any, env: dict[str, str]
    ) -> None:
        code = 70
        try:
            os.setsid()
            os.close(self._end)
            os.dup2(self._begin, 0)
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            os.environ.clear()
            os.environ.update(env)
            with groups.open("a") as stream:
                stream.write(f"{os.getpid()}\n")
            from spec_compat.pipeline import entry

            faults.arm()
            words = command[command.index("spec_compat.pipeline") + 1 :]
            code = entry.main(words)
            faults.report(words[0])
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, seconds: float | None = None) -> int:
        deadline = None if seconds is None else time.monotonic() + seconds
        while self.poll() is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("stage", seconds or 0.0)
            time.sleep(0.01)
        return self.returncode or 0


def is_gone(group: int) -> bool:
    """Whether no process of this group is left, a zombie of another parent apart."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return not members(group, leader=True)


def members(group: int, leader: bool = False) -> list[int]:
    """The living processes of a group; without its leader and what cleans up after the others."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            line = (process / "cmdline").read_bytes()
        except OSError:
            continue
        if len(fields) < 3 or fields[2] != str(group) or fields[0] == "Z":
            continue
        if leader or (int(process.name) != group and b"resource_tracker" not in line):
            found.append(int(process.name))
    return sorted(found)


def kill_group(operation: str) -> None:
    os.killpg(0, signal.SIGKILL)
