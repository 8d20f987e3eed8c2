"""The checkpoints of a run: which are whole, and what is logged of their epochs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from speculators.train.checkpointer import BaseCheckpointer

from spec_compat.pipeline import atomic


def drop_unfinished(checkpoints: Path) -> int:
    """Remove what a killed run left incomplete or what was altered; returns the epoch to go on at.

    Which epochs are whole is decided by the patch train/whole-checkpoints.
    """
    last: int = BaseCheckpointer(checkpoints).previous_epoch
    for directory in checkpoints.glob("*"):
        name = directory.name
        if (name.isdigit() and int(name) > last) or name.endswith(".part"):
            shutil.rmtree(directory)
    return last + 1


def kept_metrics(file: Path, first_epoch: int) -> list[dict[str, Any]]:
    """What earlier attempts logged of the epochs that are kept; the rest leaves the file."""
    if not file.is_file():
        return []
    kept = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
            if record["epoch"] < first_epoch:
                kept.append(record)
        except (ValueError, KeyError, TypeError):
            continue  # the kill came while it was written
    atomic.write_text(file, "".join(json.dumps(record) + "\n" for record in kept))
    return kept
