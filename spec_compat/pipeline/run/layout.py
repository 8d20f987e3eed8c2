"""The paths of a run directory; speculators' own names where it has them."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Layout:
    """Where a run keeps what; nothing is created by asking."""

    root: Path

    @property
    def manifest(self) -> Path:
        return self.root / "manifest.json"

    @property
    def shared(self) -> Path:
        """What the processes of a stage share in memory, while they do."""
        return self.root / ".shared"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def metrics(self) -> Path:
        """One JSON object a line: every training step and every validation."""
        return self.logs / "metrics.jsonl"

    @property
    def gen(self) -> Path:
        return self.root / "gen"

    @property
    def vocab_mapping(self) -> Path:
        return self.root / "vocab_mapping"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def head(self) -> Path:
        return self.root / "head"

    def prepared(self, dataset: str) -> Path:
        """Token ids and loss masks of a dataset, as `Dataset.save_to_disk` writes them."""
        return self.root / "prepared" / dataset

    def reported_rows(self, dataset: str) -> Path:
        """Rows whose loss mask is not certain, with the reason: one JSON object a line."""
        return self.logs / f"reported-{dataset}.jsonl"

    def rows(self, dataset: str) -> Path:
        """The directory of a dataset's stored rows."""
        return self.gen / dataset

    def log(self, stage: str) -> Path:
        return self.logs / f"{stage}.log"

    def patch_reports(self, stage: str) -> Path:
        """What every process of the stage reports about its patches."""
        return self.logs / "patches" / stage

    def clear(self, names: Iterable[str], keep: Collection[str] = ()) -> None:
        """Remove files and directories of the run; of a directory, what is not named in `keep`.

        A directory that is a link, as to another disk, stays and is emptied.
        """
        for path in (self.root / name for name in names):
            inside = path.is_dir() and (path.is_symlink() or keep)
            for found in path.iterdir() if inside else (path,):
                if found.name in keep:
                    continue
                if found.is_dir() and not found.is_symlink():
                    shutil.rmtree(found)
                else:
                    found.unlink(missing_ok=True)

    def remove(self, name: str) -> None:
        """Remove a file by its name in the run; one that leads out of it is somebody else's."""
        if not (name.startswith("/") or ".." in name.split("/")):
            (self.root / name).unlink(missing_ok=True)

    def relative(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()
