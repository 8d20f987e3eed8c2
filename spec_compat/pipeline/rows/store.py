"""The stored rows of a dataset: which are missing, and what becomes of those that come."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spec_compat.capture.orders import Written
from spec_compat.capture.prefill import Step
from spec_compat.pipeline.rows.index import NAME, Index
from spec_compat.pipeline.rows.prepared import BAD_ROWS, LENGTHS, Prepared, bad_rows
from spec_compat.pipeline.rows.row import RowRef, StoredRow
from spec_compat.pipeline.rows.storage import RowFiles
from spec_compat.pipeline.system import atomic

DATA_CONFIG = "data_config.json"
# Runs of spec-compat 0.1.0 repeat there what rows.index says.
OBSOLETE = "index.json"


def stored(directory: Path) -> Iterator[StoredRow]:
    """The rows of a dataset that can be trained on, by number."""
    index, left_out = Index(directory), bad_rows(directory)
    files = {name: directory / name for name in index.files}
    for number in index:
        if number not in left_out:
            ref = RowRef(directory.name, number)
            yield StoredRow(ref, files[index.holder(number)], index.length(number))


class Store:
    """The files of one dataset's rows; what is not as the index has it is missing."""

    def __init__(self, directory: Path, prepared: Prepared, storage: RowFiles) -> None:
        self.directory = directory
        self.prepared = prepared
        self.storage = storage
        directory.mkdir(parents=True, exist_ok=True)
        for part in directory.glob(".*.part"):
            part.unlink()
        (directory / OBSOLETE).unlink(missing_ok=True)
        self.bad = bad_rows(directory)
        self.index = Index(directory)
        self.altered = self.index.check()

    def missing(self) -> list[int]:
        return self._missing(range(len(self.prepared)))

    def _missing(self, numbers: range | list[int]) -> list[int]:
        return [row for row in numbers if row not in self.index and row not in self.bad]

    @property
    def lists(self) -> list[Path]:
        """What is written once all rows are."""
        return [self.directory / name for name in (NAME, LENGTHS, DATA_CONFIG)]

    def steps(self, packed: list[list[int]]) -> Iterator[Step]:
        """The steps in which something is missing, each with all of its rows."""
        for rows in packed:
            if missing := self._missing(rows):
                keep = rows if self.storage.whole_steps else missing
                yield Step(str(self.directory), {r: self.prepared[r] for r in rows}, keep)

    def written(self, file: Written) -> None:
        lengths = {row: len(self.prepared[row].ids) for row in file.rows}
        self.index.add(file.name, file.sha256, lengths)

    def refuse(self, reasons: dict[int, str], allowed: int) -> None:
        """Leave rows out for good. Raises RuntimeError when they are more than is allowed."""
        if not (reasons := {row: why for row, why in reasons.items() if row not in self.bad}):
            return
        refused = {**self.bad, **reasons}
        if len(refused) > allowed:
            row = min(reasons)
            limit = f"; with it {len(refused)} rows failed, --max-bad-rows is {allowed}"
            raise RuntimeError(
                f"{self.directory.name} row {row}: {reasons[row]}{limit if allowed else ''}"
            )
        self.bad = refused
        atomic.write_text(self.directory / BAD_ROWS, json.dumps(refused, indent=1) + "\n")

    def finish(self, data_config: dict[str, Any], lengths: list[int]) -> None:
        """Write the lists that speculators' own trainer reads, and close the index."""
        kept = {str(row): length for row, length in enumerate(lengths) if row not in self.bad}
        atomic.write_text(self.directory / LENGTHS, json.dumps(kept) + "\n")
        text = json.dumps(data_config, indent=2) + "\n"
        atomic.write_text(self.directory / DATA_CONFIG, text)
        self.index.close()
