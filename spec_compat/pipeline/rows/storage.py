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
from spec_compat.pipeline.rows import zstd
from spec_compat.pipeline.rows.row import Row
from spec_compat.pipeline.system import atomic

Kind = Literal["rows", "shards"]

# How the name of a shard ends.
SHARD = ".safetensors"
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

    def __init__(self, fp8: bool = False, compressed: bool = False) -> None:
        self.fp8 = fp8
        self.compressed = compressed

    def files(self, step: dict[int, int]) -> dict[str, list[int]]:
        shards: dict[int, list[int]] = {}
        total, before = sum(step.values()), 0
        for row, tokens in step.items():
            shards.setdefault(before * SHARDS // total, []).append(row)
            before += tokens
        return {f"shard_{rows[0]}{SHARD}": rows for rows in shards.values()}

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


def load(file: Path, number: int) -> Row:
    """The row of this number in a file, mapped into memory.

    Raises OSError when there is no such file, SafetensorError when a shard is cut or has no such
    row, and ValueError when a part of the row is missing.
    """
    if file.suffix == SHARD:
        return _from_shard(_open(file, file.stat().st_mtime_ns), number)
    row = torch.load(file, mmap=True, weights_only=True)
    if missing := {"input_ids", "loss_mask", "hidden_states"} - row.keys():
        raise ValueError(f"it has no {', '.join(sorted(missing))}")
    return Row(row["input_ids"], row["loss_mask"], row["hidden_states"])


@lru_cache(OPEN_SHARDS)
def _open(shard: Path, written: int) -> Any:
    return safe_open(shard, "pt")


def _from_shard(shard: Any, number: int) -> Row:
    def layers(kind: str) -> list[Tensor]:
        found: list[Tensor] = []
        while (name := f"{number}.{kind}.{len(found)}") in names:
            found.append(shard.get_tensor(name))
        return found

    names = set(shard.keys())
    ids, mask = (shard.get_tensor(f"{number}.{name}") for name in ("input_ids", "loss_mask"))
    states = layers("hidden_states")
    if dtype := (shard.metadata() or {}).get(ZSTD):
        states = [_whole(part, dtype, len(ids)) for part in states]
    return Row(ids, mask, states, layers("scales"))


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
