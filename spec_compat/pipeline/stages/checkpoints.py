"""The checkpoints of a run: which are whole, and what is logged of their epochs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from speculators.train.checkpointer import BaseCheckpointer

from spec_compat.pipeline.run.events import Events
from spec_compat.pipeline.system import atomic


def drop_unfinished(checkpoints: Path, epochs: int) -> int:
    """Remove what a killed run left incomplete or what was altered; returns the epoch to go on at.

    Which epochs are whole is decided by the patch train/whole-checkpoints; those beyond the last
    one of the run are somebody else's.
    """
    for directory in checkpoints.glob("*"):
        if directory.name.isdigit() and int(directory.name) >= epochs:
            shutil.rmtree(directory)
    last: int = BaseCheckpointer(checkpoints).previous_epoch
    for directory in checkpoints.glob("*"):
        name = directory.name
        if (name.isdigit() and int(name) > last) or name.endswith(".part"):
            shutil.rmtree(directory)
    return last + 1


def note_other_ranks(checkpoints: Path, first_epoch: int, ranks: int, events: Events) -> None:
    """Say when the epochs that are gone on from were trained by another number of ranks."""
    before = len(list((checkpoints / str(first_epoch - 1)).glob("random_state_*.pt")))
    if before not in (0, ranks):
        events.note(
            f"the first {first_epoch} epochs were trained on {before} GPUs, the others are on "
            f"{ranks}: steps and learning rates are no longer those of a run that was not stopped; "
            f"with --train-gpus {before} they are"
        )


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
