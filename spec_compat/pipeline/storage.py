"""How rows lie on the disk; vLLM's worker writes them through these objects, while it extracts."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spec_compat.pipeline import atomic

Row = dict[str, Any]
# Token ids, loss mask, and what `encode` made of the row's states.
Content = tuple[list[int], list[int], list[Tensor]]


class RowFiles:
    """`data_{i}.pt`: a file a row, as speculators' own trainer reads them."""

    def files(self, step: list[int]) -> dict[str, list[int]]:
        """The files of a step's rows, and the rows of each."""
        return {f"data_{row}.pt": [row] for row in step}

    def encode(self, states: list[Tensor]) -> list[Tensor]:
        """What is stored of a step's states, each [tokens, hidden]; on their device."""
        return states

    def write(self, path: Path, rows: dict[int, Content]) -> tuple[str, int]:
        """Write a file of rows; its SHA-256 and its size in bytes."""
        ((ids, mask, states),) = rows.values()
        row = {
            "input_ids": torch.tensor(ids, dtype=torch.long),
            "hidden_states": [_alone(layer) for layer in states],
            "loss_mask": torch.tensor(mask, dtype=torch.long),
        }
        with atomic.replacing(path) as stream:
            hashed = _Hashed(stream)
            torch.save(row, hashed)
        return hashed.digest.hexdigest(), hashed.size


class _Hashed:
    """A stream that knows the digest and the size of what went through it."""

    def __init__(self, stream: Any) -> None:
        self.digest = hashlib.sha256()
        self.size = 0
        self._stream = stream

    def write(self, data: Any) -> int:
        self.digest.update(data)
        self._stream.write(data)
        self.size += len(data)
        return len(data)

    def flush(self) -> None:
        self._stream.flush()


def _alone(part: Tensor) -> Tensor:
    """The same memory as a tensor of its own: torch.save writes whole storages."""
    flat = torch.frombuffer(part.view(torch.uint8).numpy(), dtype=part.dtype)
    return flat.view(part.shape)
