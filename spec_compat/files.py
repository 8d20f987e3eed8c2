"""Digests of files, and what makes a disk hold them: for the pipeline and for patches."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

CHUNK = 1 << 20


def sha256(path: Path, stopped: Callable[[], bool] = lambda: False) -> str:
    """Hex digest of a file's content, or of what was read when it was stopped."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while (chunk := stream.read(CHUNK)) and not stopped():
            digest.update(chunk)
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Have the disk hold what was written to a file, or the names in a directory.

    Some network file systems do not sync directories; there the server does it by itself.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)
