"""Waits for free space, and turns errors of a disk into one line."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Protocol

from spec_compat.errors import UserError
from spec_compat.pipeline.system.processes import SHARED
from spec_compat.pipeline.system.units import size

# What its user can mend.
ERRORS = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.EIO,
    errno.ESTALE,
    errno.ENAMETOOLONG,
)
# A file lies where a directory belongs, or the other way round.
MISPLACED = (errno.ENOTDIR, errno.EISDIR, errno.EEXIST)
# Less than this is full: what crashes there crashes because of it.
FULL = 1 << 20
# What must be free beside what was, before a stage that found no space is begun again.
MORE = 64e6
INODES = 16
POLL_SECONDS = 2.0


class Listener(Protocol):
    """Who is told about a pause."""

    def note(self, text: str) -> None:
        """One line that the user should see."""

    def doing(self, text: str) -> None:
        """What is going on now."""


def expanded(path: str | Path) -> Path:
    """The path without a leading ~; as it is where nobody has such a home, as a shell leaves it.

    Raises UserError for what no file system has a name for.
    """
    if "\0" in str(path):
        raise UserError(f"{str(path)!r}: a path cannot have a NUL byte")
    return Path(os.path.expanduser(path))  # noqa: PTH111  that of pathlib raises RuntimeError


class Full(UserError):  # noqa: N818, as the errors beside it
    """There was no space in a directory of the run; there will be when files are deleted."""

    def __init__(self, message: str, place: Path) -> None:
        super().__init__(message)
        self.place = place


def wait_for(directory: Path, needed: float, pause: bool, events: Listener) -> bool:
    """Return when this many bytes are free; whether that took a pause.

    Raises UserError where there is to be no pause. What is written already stays as it is.
    """
    free = shutil.disk_usage(directory).free
    if free >= needed:
        return False
    shortage = f"{directory}: {size(needed)} are needed next, {size(free)} are free"
    if not pause:
        raise UserError(f"{shortage}; make space, and the same command goes on from here")
    events.note(f"paused: {shortage}; it goes on by itself when there is space")
    events.doing("paused until there is space on the disk")
    while free < needed:
        time.sleep(POLL_SECONDS)
        free = shutil.disk_usage(directory).free
    events.note(f"going on: {size(free)} are free")
    return True


def refuse_beyond(limit: int | None, directory: Path, needed: float) -> None:
    """Raise UserError when the run would take more bytes than --max-disk."""
    if limit is not None and needed > limit:
        raise UserError(
            f"--max-disk {size(limit)}: the rows in {directory} take {size(needed)}; allow more, "
            "or take fewer rows with --max-samples"
        )


def described(error: OSError) -> str:
    """One line for what its user can mend at a file, empty for another error."""
    if error.errno not in (*ERRORS, *MISPLACED):
        return ""
    return f"{error.filename or 'standard output'}: {_reason(error.errno)}"


def as_user_error(error: BaseException, run: Path) -> UserError | None:
    """The error as one line with a remedy, if the disk caused it; Full if space is worth a wait."""
    number, file = (error.errno, error.filename) if isinstance(error, OSError) else (None, None)
    where = Path(str(file or run))
    if not run.is_dir():
        return UserError(f"{run}: the directory is gone")
    if number in MISPLACED and where.is_relative_to(run):
        return UserError(
            f"{where}: {_reason(number)}; move away what is in its place, and the same command "
            "goes on"
        )
    if number not in ERRORS and shutil.disk_usage(run).free < FULL:
        number, where = errno.ENOSPC, run  # torch and safetensors have errors of their own for it
    if number not in ERRORS:
        return None
    reason = _reason(number)
    if number == errno.ENOSPC and not file and shutil.disk_usage(run).free >= MORE:
        places = f"{run}, {SHARED} or {tempfile.gettempdir()}"  # semaphores name no place
        return UserError(f"{places}: {reason}; make space there, and the same command goes on")
    line = f"{where}: {reason}; what is whole is kept, and the same command goes on from there"
    if number == errno.ENOSPC and where.is_relative_to(run):
        place = next(path for path in (where, *where.parents) if path.is_dir())
        inodes = os.statvfs(place)
        if not inodes.f_files or inodes.f_favail >= INODES:  # how many would do, nobody knows
            return Full(line, place)
    return UserError(line)


def _reason(number: int | None) -> str:
    return os.strerror(number or 0).lower()
