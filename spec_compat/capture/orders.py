"""What the driver and vLLM's worker say to each other: an order with each step, and its answer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class PreparedRow(NamedTuple):
    """Token ids and loss mask (0 or 1), both of the row's length."""

    ids: list[int]
    mask: list[int]


class EncodedRow(NamedTuple):
    """A prepared row with what `Storage.encode` made of its states, each [tokens, ...]."""

    ids: list[int]
    mask: list[int]
    states: list[Tensor]


class Order(NamedTuple):
    """What becomes of a step's rows: their numbers by request id, the rows by number.

    `files` has the row numbers of each file; a row in none of them is computed and dropped.
    """

    directory: str
    numbers: dict[str, int]
    rows: dict[int, PreparedRow]
    files: dict[str, list[int]]


class Written(NamedTuple):
    """A file that has its final name: its rows, SHA-256 and size in bytes.

    A storage in memory writes no file, and hands back the states of each row instead.
    """

    directory: str
    name: str
    rows: list[int]
    sha256: str
    size: int
    states: Mapping[int, list[Tensor]] | None = None


class Refused(NamedTuple):
    """A row that failed its proof and is in no file."""

    directory: str
    row: int
    reason: str


class Failure(NamedTuple):
    """What stopped a writer; `errno` is 0 where the operating system did not say."""

    errno: int
    text: str


class Answer(NamedTuple):
    """What happened since the last answer."""

    written: list[Written]
    refused: list[Refused]
    failure: Failure | None


class Storage(Protocol):
    """What rows become. The driver plans the files, the worker encodes and writes."""

    def files(self, step: dict[int, int]) -> dict[str, list[int]]:
        """The files of a step's rows, which have this many tokens, and the rows of each."""

    def encode(self, states: list[Tensor]) -> list[Tensor]:
        """What is stored of a step's states, each [tokens, hidden]; on their device."""

    def write(self, path: Path, rows: Mapping[int, EncodedRow]) -> Written:
        """Write a file of rows, whose states lie in memory that is used again afterwards."""
