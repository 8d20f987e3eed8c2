"""One run works in a directory at a time.

The lock is held by every process that inherits its descriptor, so that no run begins beside the
processes that a killed one has left. These end by themselves: the next run waits for them.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import psutil

from spec_compat.errors import UserError
from spec_compat.pipeline.system.disk import Listener

# A stage whose runner was killed ends within seconds; a stuck disk or GPU may take longer.
WAIT_SECONDS = 120.0
POLL_SECONDS, CLOCK_SECONDS = 0.1, 2.0


@contextmanager
def locked(root: Path, say: Listener) -> Iterator[int]:
    """Hold the run directory, made if need be; a process that inherits the descriptor holds it.

    Waits for the processes of a run that was killed, and tells `say` about it. Raises UserError
    when a run works there that lives. No crash leaves the lock behind.
    """
    root.mkdir(parents=True, exist_ok=True)
    with (root / ".lock").open("a+", encoding="utf-8") as stream:
        _acquire(stream, root, say)
        stream.truncate(0)
        stream.write(json.dumps(_this_process()))
        stream.flush()
        yield stream.fileno()


def _acquire(stream: TextIO, root: Path, say: Listener) -> None:
    deadline = 0.0
    while not _try(stream, root):
        if not _is_dead(stream):
            raise UserError(f"--output {root}: another process works on this run")
        if not deadline:
            deadline = time.monotonic() + WAIT_SECONDS
            say.note("waiting for the processes of a run that was killed in this directory")
        if time.monotonic() > deadline:
            raise UserError(
                f"--output {root}: processes of a run that was killed have not ended after "
                f"{WAIT_SECONDS:.0f} seconds ({_named(root)}); end them"
            )
        time.sleep(POLL_SECONDS)


def _try(stream: TextIO, root: Path) -> bool:
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise UserError(
            f"--output {root}: its file system has no locks"
            f" ({os.strerror(error.errno or 0).lower()}), and two runs would spoil each other;"
            " choose a directory elsewhere"
        ) from None
    return True


def _this_process() -> dict[str, Any]:
    own = psutil.Process()
    return {"host": socket.gethostname(), "pid": own.pid, "started": own.create_time()}


def _is_dead(stream: TextIO) -> bool:
    """Whether the runner that took the lock has ended; not so when that cannot be told."""
    stream.seek(0)
    try:
        holder = json.loads(stream.read())
        if holder["host"] != socket.gethostname():
            return False
        process = psutil.Process(holder["pid"])
        # Its start is reckoned from a clock that may have been set since.
        same = abs(process.create_time() - float(holder["started"])) < CLOCK_SECONDS
        return not same or process.status() == psutil.STATUS_ZOMBIE
    except (ValueError, TypeError, KeyError):
        return False
    except psutil.NoSuchProcess:
        return True


def _named(root: Path) -> str:
    """The processes that were started for this directory."""
    found = psutil.process_iter(["pid", "cmdline"])
    pids = [str(p.info["pid"]) for p in found if str(root) in (p.info["cmdline"] or ())]
    return f"process {', '.join(pids)}" if pids else "their names are not known"
