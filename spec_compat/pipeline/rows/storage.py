"""How rows lie on the disk; vLLM's worker writes them through these objects, while it extracts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, Literal, cast

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from spec_compat.capture.orders import EncodedRow, Written
from spec_compat.pipeline.rows import index, zstd
from spec_compat.pipeline.system import atomic

Kind = Literal["rows", "shards"]
Row = dict[str, Any]

# The shard of each row, beside the shards.
INDEX = index.SHARDS
# The key in a shard's metadata: its states are compressed, and have this dtype.
ZSTD = "zstd"
FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
DTYPES = {
    torch.uint8: "U8",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    FP8: "F8_E4M3",
}
# Files that the rows of a step are written to, side by side.
SHARDS = 4
# Shards that a process keeps open: what is mapped costs addresses, not memory.
OPEN_SHARDS = 256


def storage(kind: Kind, fp8: bool = False, compressed: bool = False) -> RowFiles:
    """What writes rows in the form that was asked for."""
    return Shards(fp8, compressed) if kind == "shards" else RowFiles()


class RowFiles:
    """`data_{i}.pt`: a file a row, as speculators' own trainer reads them."""

    # Whether a step of which a row is missing is written anew as a whole.
    whole_steps = False
    # What lists the files, beside what every dataset has.
    lists: tuple[str, ...] = ()

    def files(self, step: dict[int, int]) -> dict[str, list[int]]:
        """The files of a step's rows, which have this many tokens, and the rows of each."""
        return {f"data_{row}.pt": [row] for row in step}

    def token_bytes(self, layers: int, hidden: int, dtype: torch.dtype) -> int:
        """Bytes of a token's states."""
        return layers * hidden * int(dtype.itemsize)

    def encode(self, states: list[Tensor]) -> list[Tensor]:
        """What is stored of a step's states, each [tokens, hidden]; on their device."""
        return states

    def write(self, path: Path, rows: Mapping[int, EncodedRow]) -> Written:
        """Write a file of rows."""
        ((ids, mask, states),) = rows.values()
        row = {
            "input_ids": torch.tensor(ids, dtype=torch.long),
            "hidden_states": [_alone(layer) for layer in states],
            "loss_mask": torch.tensor(mask, dtype=torch.long),
        }
        with atomic.replacing(path) as stream:
            hashed = _Hashed(stream)
            torch.save(row, cast("IO[bytes]", hashed))
        return hashed.written(path, rows)


class Shards(RowFiles):
    """`shard_{i}.safetensors`: rows of a step, in a file that is named after the first of them.

    Row i has the tensors `{i}.input_ids`, `{i}.loss_mask` and `{i}.hidden_states.{k}`, and with
    fp8 `{i}.scales.{k}`, float32 [tokens]: what a token's states are to be multiplied with.
    Where they are compressed, `{i}.hidden_states.{k}` is a zstd frame, uint8, of the states' first
    bytes, then their second ones: exponents are alike, fractions are not. The shard's metadata has
    their dtype.
    """

    whole_steps = True
    lists = (INDEX,)

    def __init__(self, fp8: bool = False, compressed: bool = False) -> None:
        self.fp8 = fp8
        self.compressed = compressed

    def files(self, step: dict[int, int]) -> dict[str, list[int]]:
        shards: dict[int, list[int]] = {}
        total, before = sum(step.values()), 0
        for row, tokens in step.items():
            shards.setdefault(before * SHARDS // total, []).append(row)
            before += tokens
        return {f"shard_{rows[0]}.safetensors": rows for rows in shards.values()}

    def token_bytes(self, layers: int, hidden: int, dtype: torch.dtype) -> int:
        return layers * (hidden + 4) if self.fp8 else super().token_bytes(layers, hidden, dtype)

    def encode(self, states: list[Tensor]) -> list[Tensor]:
        if not self.fp8:
            return states
        scales = [layer.abs().amax(dim=-1).float().clamp_min(1e-30) / FP8_MAX for layer in states]
        pairs = zip(states, scales, strict=True)
        return [*((layer / scale[:, None]).to(FP8) for layer, scale in pairs), *scales]

    def write(self, path: Path, rows: Mapping[int, EncodedRow]) -> Written:
        tensors = {name: tensor for row in rows.items() for name, tensor in self._tensors(*row)}
        header: dict[str, Any] = {}
        if self.compressed:
            tensors, header["__metadata__"] = _compressed(tensors)
        end = 0
        for name, tensor in tensors.items():
            begin, end = end, end + tensor.nbytes
            header[name] = {
                "dtype": DTYPES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [begin, end],
            }
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with atomic.replacing(path) as stream:
            hashed = _Hashed(stream)
            hashed.write(len(text).to_bytes(8, "little") + text)
            for tensor in tensors.values():
                hashed.write(tensor.view(torch.uint8).numpy().data.cast("B"))
        return hashed.written(path, rows)

    def _tensors(self, row: int, content: EncodedRow) -> Iterator[tuple[str, Tensor]]:
        """Widest elements first, so that each is aligned."""
        ids, mask, states = content
        yield f"{row}.input_ids", torch.tensor(ids, dtype=torch.long)
        yield f"{row}.loss_mask", torch.tensor(mask, dtype=torch.long)
        layers = len(states) // 2 if self.fp8 else len(states)
        for layer, scales in enumerate(states[layers:]):
            yield f"{row}.scales.{layer}", scales
        for layer, part in enumerate(states[:layers]):
            yield f"{row}.hidden_states.{layer}", part


def load(file: Path) -> Row:
    """The row of this `data_{i}.pt`, mapped into memory; from a shard where it is in one.

    A row is input_ids and loss_mask int64 [s], hidden_states: tensors [s, hidden] by depth, and
    with fp8 scales: tensors float32 [s]. Raises OSError when it is nowhere, and
    SafetensorError when its shard is cut.
    """
    if (shard := holder(file)) != file:  # whatever lies beside it under the name of the row
        return _from_shard(_open(shard, shard.stat().st_mtime_ns), str(_number(file)))
    row: Row = torch.load(file, mmap=True, weights_only=True)
    return row


def holder(file: Path) -> Path:
    """What holds the row of this `data_{i}.pt`: that file, or a shard. It need not be there."""
    there = file.parent / INDEX
    shard = _shards(there, atomic.Stamp.of(there)).get(str(_number(file)))
    return file.parent / Path(shard).name if shard else file


def decoded(row: Row) -> Row:
    """The row with states in bfloat16, whatever they were stored in."""
    if "scales" not in row:
        return row
    pairs = zip(row["hidden_states"], row["scales"], strict=True)
    states = [(layer.float() * scale[:, None]).bfloat16() for layer, scale in pairs]
    return {**{k: v for k, v in row.items() if k != "scales"}, "hidden_states": states}


def _number(file: Path) -> int:
    return int(file.stem.rpartition("_")[2])


@lru_cache
def _shards(file: Path, written: atomic.Stamp | None) -> dict[str, str]:
    """The shard of each row that is in one; none of a list that is spoilt."""
    try:
        rows = json.loads(file.read_text("utf-8"))["rows"]
        return {str(row): str(shard) for row, shard in rows.items()}
    except (FileNotFoundError, ValueError, LookupError, TypeError, AttributeError):
        return {}  # their rows are missing then


@lru_cache(OPEN_SHARDS)
def _open(shard: Path, written: int) -> Any:
    return safe_open(shard, "pt")


def _from_shard(shard: Any, number: str) -> Row:
    def layers(kind: str) -> list[Tensor]:
        found: list[Tensor] = []
        while (name := f"{number}.{kind}.{len(found)}") in names:
            found.append(shard.get_tensor(name))
        return found

    names = set(shard.keys())
    row = {name: shard.get_tensor(f"{number}.{name}") for name in ("input_ids", "loss_mask")}
    row["hidden_states"] = layers("hidden_states")
    if dtype := (shard.metadata() or {}).get(ZSTD):
        tokens = len(row["input_ids"])
        row["hidden_states"] = [_whole(part, dtype, tokens) for part in row["hidden_states"]]
    if f"{number}.scales.0" in names:
        row["scales"] = layers("scales")
    return row


def _compressed(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors, with frames for the states, and what the shard says of itself."""
    found, dtype = {}, ""
    for name, tensor in tensors.items():
        if ".hidden_states." not in name:
            found[name] = tensor
            continue
        dtype = DTYPES[tensor.dtype]
        planes = tensor.view(torch.uint8).unflatten(-1, (-1, tensor.itemsize)).unbind(-1)
        frame = zstd.compress((plane.contiguous().numpy() for plane in planes), tensor.nbytes)
        found[name] = torch.frombuffer(frame, dtype=torch.uint8)
    # What is aligned to eight bytes comes first, frames have any length.
    ordered = sorted(found.items(), key=lambda item: item[1].dtype == torch.uint8)
    return dict(ordered), {ZSTD: dtype}


def _whole(frame: Tensor, dtype: str, tokens: int) -> Tensor:
    """States [tokens, hidden] of this frame."""
    kind = next(torch_dtype for torch_dtype, name in DTYPES.items() if name == dtype)
    planes = np.frombuffer(zstd.decompress(frame.numpy()), np.uint8)
    planes = planes.reshape(kind.itemsize, tokens, -1)
    whole = np.empty((*planes.shape[1:], kind.itemsize), np.uint8)
    for place, plane in enumerate(planes):
        whole[..., place] = plane
    return torch.from_numpy(whole).flatten(-2).view(kind)


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

    def written(self, path: Path, rows: Mapping[int, EncodedRow]) -> Written:
        digest = self.digest.hexdigest()
        return Written(str(path.parent), path.name, list(rows), digest, self.size)


def _alone(part: Tensor) -> Tensor:
    """The same memory as a tensor of its own: torch.save writes whole storages."""
    flat = torch.frombuffer(part.view(torch.uint8).numpy(), dtype=part.dtype)
    return flat.view(part.shape)
