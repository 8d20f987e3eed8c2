"""The rows of a dataset: what was prepared, what is stored, and what can be wrong with one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow.compute  # type: ignore[import-untyped]
import torch
from datasets import load_from_disk

from spec_compat.capture.orders import PreparedRow
from spec_compat.pipeline.rows.row import Row

LENGTHS = "sample_lengths.json"
BAD_ROWS = "bad_rows.json"
LENGTHS_AT_ONCE = 10_000


def bad_rows(directory: Path) -> dict[int, str]:
    """Rows of a dataset that extraction refused, with the reason; none in a list that is spoilt."""
    file = directory / BAD_ROWS
    try:
        return {int(row): str(why) for row, why in json.loads(file.read_text("utf-8")).items()}
    except (FileNotFoundError, ValueError, AttributeError):
        return {}  # they will be refused again


class Prepared:
    """The rows of one dataset: token ids and loss mask, both lists of the row's length."""

    def __init__(self, directory: Path) -> None:
        self._rows = load_from_disk(str(directory)).with_format(None)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        lengths: list[int] = []
        for batch in self._rows.with_format("arrow").iter(LENGTHS_AT_ONCE):
            lengths += pyarrow.compute.list_value_length(batch["input_ids"]).to_pylist()
        return lengths

    def __getitem__(self, index: int) -> PreparedRow:
        row = self._rows[index]
        return PreparedRow(row["input_ids"], row["loss_mask"])

    def __iter__(self) -> Iterator[PreparedRow]:
        for row in self._rows:
            yield PreparedRow(row["input_ids"], row["loss_mask"])


def fault(row: Row, prepared: PreparedRow, layers: int, dtype: torch.dtype) -> str:
    """What is wrong with a stored row, empty when nothing is."""
    (ids, mask), states = prepared, row.hidden_states
    if row.input_ids.tolist() != ids:
        return "its token ids are not those that were prepared"
    if row.loss_mask.tolist() != mask:
        return "its loss mask is not the one that was prepared"
    if len(mask) != len(ids):
        return f"{len(ids)} tokens, but a loss mask of {len(mask)}"
    if len(states) != layers:
        return f"states of {len(states)} layers, not {layers}"
    width = states[0].shape[-1]
    for layer, state in enumerate(states):
        if state.dtype != dtype:
            return f"states are {state.dtype}, the verifier is {dtype}"
        if state.shape != (len(ids), width):
            return f"{len(ids)} tokens, but states of shape {tuple(state.shape)}"
        if not torch.isfinite(state).all():
            return f"the states of captured layer {layer} are not finite"
    return ""
