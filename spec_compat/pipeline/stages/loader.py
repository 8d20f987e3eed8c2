"""Feeds the trainer: batches of whole rows, read by worker processes, made whole on the device.

Rows are mapped into memory and copied once, in the dtype in which they are stored, into the batch;
what the draft head is given, float32 with noise, is made of it where the head is. Batches lie in
shared memory that is used again: new memory takes longer to get than the copy into it.
"""

from __future__ import annotations

import errno
import os
import random
import tempfile
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.context import ForkContext
from multiprocessing.queues import Queue
from typing import Any

import numpy as np
import torch
from speculators.train.data import create_collate_fn, shift_batch
from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from spec_compat.errors import UserError
from spec_compat.pipeline.rows import storage
from spec_compat.pipeline.rows.row import Row, StoredRow
from spec_compat.pipeline.run.stage import Job
from spec_compat.pipeline.stages.prefetch import workers_and_prefetch
from spec_compat.pipeline.system.processes import SHARED

# Numbers that are decoded at a time: what is between fp8 and float32 stays in the cache, and the
# threads of a busy CPU, which wait for each other after each of them, do so seldom.
BLOCK = 1 << 22
# Seconds after which a batch that does not come ends the training, which can then be continued: a
# worker, or the network that the rows lie behind, may never come back.
STALLED = 1800
STATES, LAST = "hidden_states", "verifier_last_hidden_states"

Batch = dict[str, Tensor]
# A row's small tensors, and those places of its states which belong beside them.
Item = tuple[Batch, Row]
# The name, shape and dtype of a part of a batch.
Slab = tuple[str, tuple[int, ...], torch.dtype]


def loader(
    job: Job,
    rows: Sequence[StoredRow],
    total_seq_len: int,
    world_size: int,
    rank: int,
    noise_std: float,
) -> Batches:
    """Batches of whole rows, packed to `total_seq_len` tokens; the same for the same seed.

    Noise is added on the device, as speculators' AddUniformNoise(noise_std) does; 0 adds none.
    """
    batch_bytes = total_seq_len * _token_bytes(rows[0])
    workers, prefetch = workers_and_prefetch(batch_bytes, job.config.num_workers, world_size)
    generator = torch.Generator().manual_seed(job.config.seed + rank)
    lost, losing = Pipe(duplex=False)
    batches = DataLoader(
        RowDataset(rows),
        batch_sampler=MultipackDistributedBatchSamplerV2(
            batch_max_length=total_seq_len,
            # speculators guesses lengths from file sizes; a guess too low cuts the last row off.
            lengths=[row.length for row in rows],
            num_replicas=world_size,
            rank=rank,
            seed=job.config.seed,
        ),
        num_workers=workers,
        prefetch_factor=prefetch if workers else None,
        timeout=STALLED if workers else 0,
        pin_memory=torch.cuda.is_available(),
        collate_fn=Collate(total_seq_len, prefetch + 1 if workers else 1),
        multiprocessing_context=EndingContext(losing) if workers else None,
        generator=generator,
    )
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if on_gpu else "cpu"
    return Batches(batches, torch.device(device), noise_std, lost)


def _token_bytes(stored: StoredRow) -> int:
    row = storage.load(stored.file, stored.ref.number)
    states = [*row.hidden_states, *row.scales]
    return sum(part.nbytes for part in states) // len(row.input_ids) + 40


class RowDataset(Dataset[Item]):
    """The rows as they are stored, mapped; speculators decides which places go together."""

    def __init__(self, rows: Sequence[StoredRow]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Item:
        ref, file, _ = self._rows[index]
        row = storage.load(file, ref.number)
        length = len(row.input_ids)
        places = torch.arange(length)
        ids = {"input_ids": row.input_ids, "loss_mask": row.loss_mask}
        small = {"lengths": torch.tensor([length]), "position_ids": places}
        return shift_batch({**ids, **small, STATES: places, LAST: places}), row


class Collate:
    """Packs rows into a batch of `length` tokens, the last of them cut or the rest left zero.

    The states of a batch are valid until `kept` more batches were made in the same process.
    """

    def __init__(self, length: int, kept: int) -> None:
        self._length = length
        self._kept = kept
        self._small = create_collate_fn(length)
        self._slabs: dict[Slab, deque[Tensor]] = defaultdict(deque)

    def __call__(self, items: list[Item]) -> Batch:
        batch: Batch = self._small([small for small, _row in items])
        for name, layers in ((STATES, slice(None, -1)), (LAST, slice(-1, None))):
            parts = [(small[name], _columns(row, layers)) for small, row in items]
            batch[name] = self._pack(name, parts)
        return batch

    def _pack(self, name: str, parts: list[tuple[Tensor, list[Tensor]]]) -> Tensor:
        """[1, length, width]: places of each row, its columns side by side; see `unpack`."""
        columns = parts[0][1]
        width = sum(column.shape[-1] for column in columns)
        packed = self._slab(name, (1, self._length, width), columns[0].dtype)
        begin = 0
        for places, columns in parts:
            end = min(self._length, begin + len(places))
            if end > begin:
                here = slice(int(places[0]), int(places[0]) + end - begin)
                torch.cat([column[here] for column in columns], dim=-1, out=packed[0, begin:end])
            begin = end
        packed[0, begin:] = 0
        return packed

    def _slab(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        slabs = self._slabs[name, shape, dtype]
        if len(slabs) == self._kept:
            slabs.rotate(-1)
        else:
            slabs.append(torch.empty(shape, dtype=dtype))
            if get_worker_info() is not None:
                slabs[-1].share_memory_()
        return slabs[-1]


def _columns(row: Row, layers: slice) -> list[Tensor]:
    """What lies side by side for each token: states, or the bytes of states and their scales."""
    if not row.scales:
        return row.hidden_states[layers]
    scales = [scale[:, None].view(torch.uint8) for scale in row.scales[layers]]
    return [*(layer.view(torch.uint8) for layer in row.hidden_states[layers]), *scales]


def unpack(packed: Tensor, layers: int) -> Tensor:
    """A new float32 [1, s, layers * hidden] of a packed tensor.

    Of bytes, the last 4 a layer are its scale. The others are e4m3: moved to where float16 has
    sign, exponent and fraction they are the same number / 256, which a CPU converts ten times as
    fast.
    """
    if packed.dtype != torch.uint8:
        return packed.to(torch.float32, copy=True)
    shape = (*packed.shape[:-1], packed.shape[-1] - 4 * layers)
    whole = torch.empty(shape, dtype=torch.float32, device=packed.device)
    tokens = max(1, BLOCK // shape[-1])
    for block, out in zip(packed.split(tokens, dim=1), whole.split(tokens, dim=1), strict=True):
        half = block[..., : -4 * layers].view(torch.int8).short()
        half.bitwise_left_shift_(7).bitwise_and_(~0x4000)
        scales = block[..., -4 * layers :].contiguous().view(torch.float32)
        out.copy_(half.view(torch.float16))
        out.unflatten(-1, (layers, -1)).mul_(256 * scales[..., None])
    return whole


def add_noise(states: Tensor, std: float) -> None:
    """In place, what speculators' AddUniformNoise makes with four tensors more of that size."""
    states.add_(torch.rand_like(states).sub_(0.5).mul_(2).mul_(std))


class Batches:
    """A loader's batches on the device, as the draft head takes them; else it is that loader.

    `waited` counts the seconds in which no batch was there when one was asked for.
    """

    def __init__(
        self,
        batches: DataLoader[Item],
        device: torch.device,
        noise_std: float,
        lost: Connection[Any, Any],
    ) -> None:
        self._batches = batches
        self._device = device
        self._noise_std = noise_std
        self._lost = lost
        self.waited = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._moved():
            batch[STATES] = unpack(batch[STATES], 3)
            batch[LAST] = unpack(batch[LAST], 1)
            if self._noise_std:
                add_noise(batch[STATES], self._noise_std)
            yield batch

    def _moved(self) -> Iterator[Batch]:
        """The batches on the device.

        A GPU has the next one copied on a stream of its own while the step before it computes.
        """
        stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        ready = deque[Batch]()
        for batch in self._handed_over():
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                moved = {k: v.to(self._device, non_blocking=True) for k, v in batch.items()}
            ready.append(moved)
            if stream is None or len(ready) > 1:
                yield self._arrived(ready.popleft(), stream)
        while ready:
            yield self._arrived(ready.popleft(), stream)

    def _arrived(self, batch: Batch, stream: torch.cuda.Stream | None) -> Batch:
        """The batch for the training's stream, which gives its memory back."""
        if stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(stream)
            for tensor in batch.values():
                tensor.record_stream(current)
        return batch

    def _handed_over(self) -> Iterator[Batch]:
        """The loader's own batches. Raises UserError where there is no place to hand them over."""
        asked = time.perf_counter()
        try:
            for batch in self._batches:
                self.waited += time.perf_counter() - asked
                yield batch
                asked = time.perf_counter()
        except (OSError, RuntimeError) as error:
            # Its semaphores lie in the shared memory too; for them it only says that it is full.
            full = isinstance(error, OSError) and error.errno == errno.ENOSPC
            if not (full or self._lost.poll() or "shared memory" in str(error)):
                raise
            cause = self._lost.recv() if self._lost.poll() else str(error).strip().splitlines()[-1]
            raise UserError(
                f"a batch could not be handed to the trainer ({cause}): make space in {SHARED} and "
                f"{tempfile.gettempdir()}, or pass --num-workers 0"
            ) from error


class EndingQueue(Queue):  # type: ignore[type-arg]
    """A queue that ends the worker whose batch cannot be sent; else its thread goes on in silence.

    Both sides would wait for ever then: a batch is sent through shared memory, its descriptor
    through a socket in the directory for temporary files, and each may be full.
    """

    def __init__(self, maxsize: int, context: EndingContext) -> None:
        super().__init__(maxsize, ctx=context)
        self._losing = context.losing

    def _on_queue_feeder_error(self, error: Exception, batch: object) -> None:
        traceback.print_exception(error)
        self._losing.send(" ".join(f"{type(error).__name__}: {error}".split()))
        if get_worker_info() is not None:
            os._exit(1)


class EndingContext(ForkContext):
    """How a loader starts its workers; what is lost is said through `losing`."""

    def __init__(self, losing: Connection[Any, Any]) -> None:
        super().__init__()
        self.losing = losing

    def Queue(self, maxsize: int = 0) -> EndingQueue:  # noqa: N802
        return EndingQueue(maxsize, self)


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
