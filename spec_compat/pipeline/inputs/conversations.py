"""Files of conversations: read line by line, checked, and brought to the form speculators reads."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spec_compat.errors import UserError
from spec_compat.pipeline.system.atomic import sha256

SUFFIXES = (".json", ".jsonl")
ASSISTANT = ("gpt", "assistant")
# What a chat template may read of a turn, beside its role and text.
KEPT = ("reasoning_content", "thinking", "tool_calls", "tool_call_id", "name")
CHARACTERS_PER_TOKEN = 4
BEYOND = "JSON beyond what Python reads; leave this row out"
# JSON can write it, UTF-8 and with it every tokenizer cannot.
HALF = re.compile("[\ud800-\udfff]")

Turns = list[dict[str, Any]]


@dataclass
class FileCheck:
    """What a file holds; `characters` has the length of every usable conversation."""

    sha256: str
    rows: int = 0
    characters: list[int] = field(default_factory=list)
    unusable: Counter[str] = field(default_factory=Counter)

    @property
    def usable(self) -> int:
        return len(self.characters)

    def estimate_tokens(self, seq_length: int, max_samples: int | None) -> int:
        """Tokens that the rows will have, from their characters: right within a factor of two."""
        tokens = sum(min(seq_length, n // CHARACTERS_PER_TOKEN) for n in self.characters)
        if max_samples is not None and max_samples < self.usable:
            tokens = tokens * max_samples // self.usable
        return tokens


class UnusableError(Exception):
    """Why a row has nothing to train on."""


def check(path: Path) -> FileCheck:
    """Read a whole file. Raises UserError with the line of the first fault."""
    try:
        result = FileCheck(sha256=sha256(path))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    for record in records(path):
        result.rows += 1
        try:
            conversation = turns(record)
        except UnusableError as reason:
            result.unusable[str(reason)] += 1
            continue
        result.characters.append(sum(len(turn["value"]) for turn in conversation))
    if not result.usable:
        reasons = ", ".join(f"{count} x {reason}" for reason, count in result.unusable.items())
        raise UserError(f"{path}: no usable conversation ({reasons or 'the file is empty'})")
    return result


def records(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a .jsonl file, or of a .json file that is a list. Raises UserError."""
    return (record for _, record in numbered(path))


def numbered(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows with their line, or in a list with their place, from 1. Raises UserError."""
    try:
        with path.open("rb") as stream:
            if path.suffix == ".json" and _starts_with_list(stream.read(4096)):
                yield from _list_records(path)
                return
            stream.seek(0)
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield number, _parse(line, f"{path}:{number}")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None


def turns(record: dict[str, Any]) -> Turns:
    """The turns of a row, as `from` and `value`. Raises UnusableError."""
    raw = record.get("conversations") or record.get("messages")
    if not isinstance(raw, list):
        raise UnusableError("no list under conversations or messages")
    conversation = [_turn(turn) for turn in raw]
    if not any(turn["from"] in ASSISTANT and _speaks(turn) for turn in conversation):
        raise UnusableError("no answer of an assistant")
    texts = [
        text(record.get("tools", "")),
        *(part for turn in conversation for part in turn.values()),
    ]
    if any(map(HALF.search, texts)):
        raise UnusableError("half of a character, as where a text was cut: a lone surrogate")
    return conversation


def _speaks(turn: dict[str, Any]) -> bool:
    return bool(turn["value"].strip() or turn.get("tool_calls"))


def _turn(turn: Any) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise UnusableError("a turn that is not an object")
    role = turn.get("from", turn.get("role"))
    content = turn.get("value", turn.get("content"))
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise UnusableError("a turn with something other than text")
        content = "".join(map(str, parts))
    if not isinstance(role, str) or not isinstance(content, str | None):
        raise UnusableError("a turn without role or text")
    kept = {key: text(turn[key]) for key in KEPT if turn.get(key)}
    return {"from": role, "value": content or "", **kept}


def text(value: Any) -> str:
    """A string as it is, anything else as JSON: a column of Arrow has one type."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _starts_with_list(head: bytes) -> bool:
    return head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["


def _list_records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: not JSON: {error.msg}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text: {error.reason}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: {BEYOND}: {error}") from None
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise UserError(f"{path}: row {number} is not a JSON object")
        yield number, row


def _parse(line: bytes, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        raise UserError(f"{place}: not JSON: {error.msg} at column {error.colno}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{place}: not UTF-8 text: {error.reason}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place}: {BEYOND}: {error}") from None
    if not isinstance(row, dict):
        raise UserError(f"{place}: not a JSON object")
    return row
