"""A stored row: its name, its file, its tensors. How it is written is in `storage.py`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class RowRef(NamedTuple):
    """The name of a row: its dataset, and its number among the prepared rows."""

    dataset: str
    number: int

    def __str__(self) -> str:
        return f"{self.dataset}/{self.number}"

    @classmethod
    def parse(cls, text: str) -> RowRef:
        """The inverse of `str`; runs of spec-compat 0.1.0 name rows `gen/<dataset>/data_17.pt`."""
        found = re.fullmatch(r"(?:gen/)?(.+)/(?:data_)?(\d+)(?:\.pt)?", text)
        if found is None:
            raise ValueError(f"{text}: not the name of a row")
        return cls(found[1], int(found[2]))


class StoredRow(NamedTuple):
    """A row with the file that holds it and its length in tokens."""

    ref: RowRef
    file: Path
    length: int


@dataclass(frozen=True)
class Row:
    """What a file holds of a row.

    `input_ids` and `loss_mask` are int64 [s]; `hidden_states` are [s, hidden], by depth. With fp8
    each has `scales`, float32 [s]: what a token's states are to be multiplied with.
    """

    input_ids: Tensor
    loss_mask: Tensor
    hidden_states: list[Tensor]
    scales: Sequence[Tensor] = ()

    def decoded(self) -> Row:
        """The row with states in bfloat16, whatever they were stored in."""
        if not self.scales:
            return self
        pairs = zip(self.hidden_states, self.scales, strict=True)
        states = [(layer.float() * scale[:, None]).bfloat16() for layer, scale in pairs]
        return Row(self.input_ids, self.loss_mask, states)
