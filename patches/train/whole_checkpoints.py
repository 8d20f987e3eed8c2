"""A run that is killed while it saves leaves half a checkpoint, and resumes from it.

Symptom  SafetensorError, EOFError or FileNotFoundError when a run is resumed; or, where the kill
         came between optimizer and scheduler, a learning rate that starts over without a word.
Cause    `save_checkpoint` writes into the epoch's directory, and `_get_previous_epoch` takes the
         highest number for the last checkpoint, whatever is in it.
Fix      An epoch is written into a hidden directory, with the checksums of its files, synced, and
         renamed. An epoch counts if its files have their checksums; without checksums, as written
         by the unpatched trainer, if its files are there and whole. The last one that counts is
         resumed from.
Remove when speculators 0.3 and 0.4 are no longer supported.
"""

import shutil
import zipfile
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

from spec_compat.files import sha256, sync
from spec_compat.patching import NEEDED, Patch, Probe, moved, parameters

SUMS = "SHA256SUMS"
FILES = ("config.json", "model.safetensors", "optimizer_state_dict.pt")

patch = Patch(
    module="speculators.train.trainer",
    when={"speculators": ">=0.3,<0.5"},
    after=("train/resume",),
)


@patch.probe
def needed(module: ModuleType) -> Probe:
    if parameters(module.Trainer.save_checkpoint) != {"self", "epoch"}:
        return moved("Trainer.save_checkpoint takes other parameters")
    return NEEDED


@patch.replace("Trainer.save_checkpoint")
def save(original: Callable[..., None], module: ModuleType) -> Callable[..., None]:
    @wraps(original)
    def save_checkpoint(self: Any, epoch: int) -> None:
        path: Path = self.checkpointer.path
        part = path / f".{epoch}.part"
        rank = module.dist.get_rank() if self.is_distributed else 0
        if rank == 0:
            shutil.rmtree(part, ignore_errors=True)
        if self.is_distributed:
            module.dist.barrier()
        self.checkpointer.path = part
        try:
            original(self, epoch)
        finally:
            self.checkpointer.path = path
        if self.is_distributed:
            module.dist.barrier()
        if rank == 0:
            _seal(part / str(epoch))
            shutil.rmtree(path / str(epoch), ignore_errors=True)
            (part / str(epoch)).rename(path / str(epoch))
            part.rmdir()
            sync(path)
        if self.is_distributed:
            module.dist.barrier()

    return save_checkpoint


@patch.replace("BaseCheckpointer._get_previous_epoch")
def previous(original: Callable[..., int], module: ModuleType) -> Callable[..., int]:
    @wraps(original)
    def _get_previous_epoch(self: Any) -> int:
        if not self.path.is_dir():
            return -1
        epochs = sorted(
            (int(d.name) for d in self.path.iterdir() if d.name.isdigit()), reverse=True
        )
        for epoch in epochs:
            if _is_whole(self.path / str(epoch)):
                return epoch
            module.root_logger.warning(f"The checkpoint of epoch {epoch} is not whole.")
        return -1

    return _get_previous_epoch


def _seal(directory: Path) -> None:
    """Record the files' checksums, and sync all of it."""
    files = sorted(file for file in directory.iterdir() if file.name != SUMS)
    lines = "".join(f"{sha256(file)}  {file.name}\n" for file in files)
    (directory / SUMS).write_text(lines, encoding="utf-8")
    for path in (*files, directory / SUMS, directory):
        sync(path)


def _is_whole(directory: Path) -> bool:
    if not (directory / SUMS).is_file():
        states = [directory / "optimizer_state_dict.pt", directory / "scheduler_state_dict.pt"]
        return all((directory / name).is_file() for name in FILES) and all(
            zipfile.is_zipfile(state) for state in states if state.exists()
        )
    try:
        lines = (directory / SUMS).read_text(encoding="utf-8").splitlines()
        sums = {name: digest for digest, name in (line.split("  ") for line in lines)}
        return sums.keys() >= set(FILES) and all(
            sha256(directory / name) == digest for name, digest in sums.items()
        )
    except (OSError, ValueError):
        return False
