"""Rows on their way from vLLM's worker to the disk, while the next steps compute.

Between two steps a GPU is idle while the worker's thread works, and to copy states then would delay
the sampled tokens. So nothing is copied until the next step is launched. Then, on a CUDA stream of
their own, the rows are proved and copied into a host buffer; threads write those that are sound,
and the buffer is free again. There is a fixed number of buffers: with none free, the step waits.

The driver sends an order with each step, and is answered with what was written since the last.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from queue import LifoQueue
from typing import TYPE_CHECKING, Any, NamedTuple

from spec_compat.capture.orders import Answer, EncodedRow, Failure, Order, Refused, Storage
from spec_compat.capture.proof import contradiction, gaps

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Where nobody says how many buffers: as many as this, in bytes, holds, within these limits.
BUFFER_BYTES = 2 << 30
MIN_BUFFERS, MAX_BUFFERS = 3, 8
MAX_WRITERS = 8


def buffer_count(step_bytes: int, asked: int | None) -> int:
    """Steps of at most this many bytes that the host holds; all of them are made at once."""
    return asked or min(MAX_BUFFERS, max(MIN_BUFFERS, BUFFER_BYTES // step_bytes))


class Place(NamedTuple):
    """Where the tokens of a row lie in a step."""

    request_id: str
    number: int
    start: int
    stop: int


@dataclass
class Buffer:
    """Host memory for one step, page-locked where a device copies into it; all [tokens, ...]."""

    states: list[Tensor]
    finite: Tensor
    proof: Tensor


@dataclass
class LaunchedStep:
    """A step in the worker; its rows are in the buffer once `copied()` returns.

    `states` and `finite`, [tokens, ...], and `logits`, [rows, vocabulary], are on the device once
    the event `computed` is over; without a device that computes by itself it is None.
    """

    order: Order
    places: list[Place]
    buffer: Buffer
    states: list[Tensor]
    finite: Tensor
    logits: Tensor
    computed: torch.cuda.Event | None
    sampled: list[int] = field(default_factory=list)
    copied: Callable[[], None] = lambda: None
    files_left: int = 0

    def refused(self) -> dict[int, str]:
        """Reasons by row number."""
        found = {}
        proofs = self.buffer.proof[: len(self.places)].tolist()
        for place, (gap, token), sampled in zip(self.places, proofs, self.sampled, strict=True):
            if not bool(self.buffer.finite[place.start : place.stop].all()):
                found[place.number] = "NaN or infinity in its states"
            elif reason := contradiction(gap, token, sampled):
                found[place.number] = reason
        return found

    def rows(self) -> dict[int, EncodedRow]:
        """The rows by number; their states are views of the buffer."""
        return {
            place.number: EncodedRow(
                *self.order.rows[place.number],
                [states[place.start : place.stop] for states in self.buffer.states],
            )
            for place in self.places
        }


class Sink:
    """Takes the steps of one worker, each of at most `tokens` tokens; see the module."""

    def __init__(self, storage: Storage, tokens: int, buffers: int | None) -> None:
        self.storage = storage
        self.tokens = tokens
        self.buffers = buffers
        self.step: LaunchedStep | None = None  # launched
        self.computed: LaunchedStep | None = None  # and its tokens sampled
        self.free: LifoQueue[Buffer] = LifoQueue()  # what was used last is warm
        self.made = 0
        writers = max(2, min(MAX_WRITERS, (os.cpu_count() or 2) // 2))
        self._writers = ThreadPoolExecutor(writers, "row-writer")
        self._side: torch.cuda.Stream | None = None
        self._lock = threading.Lock()
        self._answer = Answer([], [], None)

    def take(
        self, order: Order, places: list[Place], streams: list[Tensor], logits: Tensor
    ) -> None:
        """Have computed, for the step that is launched, what is stored of it and what proves it.

        `streams` are the layers' states [tokens, hidden], `logits` [rows, vocabulary] those of each
        row's last token.
        """
        import torch

        states = [layer[: places[-1].stop] for layer in streams]
        # The greatest of a token's magnitudes is NaN or infinite where one of them is.
        greatest = [layer.abs().amax(dim=-1) for layer in states]
        finite = torch.stack(greatest).isfinite().all(dim=0)
        encoded = self.storage.encode(states)
        computed = torch.cuda.current_stream().record_event() if logits.is_cuda else None
        buffer = self._buffer(encoded)
        self.step = LaunchedStep(order, places, buffer, encoded, finite, logits, computed)

    def sampled(self, output: Any) -> None:
        """The step has been computed, and these are the tokens that vLLM sampled."""
        step, self.step = self.step, None
        if step is None:
            return
        sampled = zip(output.req_ids, output.sampled_token_ids, strict=True)
        tokens = {request: int(ids[-1]) for request, ids in sampled if len(ids)}
        if unsampled := {place.request_id for place in step.places} - tokens.keys():
            raise RuntimeError(f"vLLM sampled no token for {sorted(unsampled)}")
        step.sampled = [tokens[place.request_id] for place in step.places]
        self.computed = step
        if step.computed is None:
            self.release()

    def release(self) -> None:
        """Have the rows of the last step that was computed proved, copied and written."""
        import torch

        step, self.computed = self.computed, None
        if step is None:
            return
        with torch.inference_mode(), self._beside(step):
            self._copy(step)
            if self._side is not None:
                step.copied = self._side.record_event().synchronize
        self._writers.submit(self._write_sound, step)

    def answer(self) -> Answer:
        with self._lock:
            answer, self._answer = self._answer, Answer([], [], self._answer.failure)
        return answer

    def drain(self) -> Answer:
        """Wait until everything is written."""
        self.release()
        for buffer in [self.free.get() for _ in range(self.made)]:
            self.free.put(buffer)
        return self.answer()

    def _buffer(self, encoded: list[Tensor]) -> Buffer:
        """A free buffer. All are made with the first step: to lock pages stops the device."""
        token_bytes = sum(part[0].numel() * part.element_size() for part in encoded)
        self.buffers = buffer_count(self.tokens * token_bytes, self.buffers)
        while self.made < self.buffers:
            self.free.put(self._allocated(encoded))
            self.made += 1
        return self.free.get()

    def _allocated(self, encoded: list[Tensor]) -> Buffer:
        import torch

        def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, pin_memory=encoded[0].is_cuda)

        return Buffer(
            [empty((self.tokens, *part.shape[1:]), part.dtype) for part in encoded],
            empty((self.tokens,), torch.bool),
            empty((self.tokens, 2), torch.float32),
        )

    def _beside(self, step: LaunchedStep) -> AbstractContextManager[Any]:
        """Where there is a device: the stream beside the model's, once the step is computed."""
        import torch

        if step.computed is None:
            return nullcontext()
        self._side = self._side or torch.cuda.Stream()
        self._side.wait_event(step.computed)
        return torch.cuda.stream(self._side)

    def _copy(self, step: LaunchedStep) -> None:
        """Prove the rows, and copy all that is known of them into the buffer."""
        import torch

        device = step.logits.device
        tokens = torch.tensor(step.sampled).to(device, non_blocking=True)
        proof = gaps(step.logits, tokens)
        buffer = step.buffer
        pairs = [*zip(buffer.states, step.states, strict=True), (buffer.finite, step.finite)]
        for host, tensor in [*pairs, (buffer.proof, proof)]:
            host[: len(tensor)].copy_(tensor, non_blocking=True)
        if self._side is not None:  # the model's stream, which made them, wants their memory
            for tensor in (*step.states, step.finite, step.logits):
                tensor.record_stream(self._side)
        del step.states, step.finite, step.logits

    def _write_sound(self, step: LaunchedStep) -> None:
        """Once a step's rows are in their buffer: report the bad ones, have the others written."""
        try:
            step.copied()
            refused, rows = step.refused(), step.rows()
            with self._lock:
                self._answer.refused.extend(
                    Refused(step.order.directory, row, why) for row, why in refused.items()
                )
            files = {
                name: {row: rows[row] for row in there if row not in refused}
                for name, there in step.order.files.items()
            }
            files = {name: content for name, content in files.items() if content}
            step.files_left = len(files)
            for name, content in files.items():
                self._writers.submit(self._write, step, name, content)
            if not files:
                self.free.put(step.buffer)
        except Exception as error:
            self._fail(error)
            self.free.put(step.buffer)

    def _write(self, step: LaunchedStep, name: str, rows: dict[int, EncodedRow]) -> None:
        try:
            if self._answer.failure is None:
                written = self.storage.write(Path(step.order.directory, name), rows)
                with self._lock:
                    self._answer.written.append(written)
        except Exception as error:
            self._fail(error)
        with self._lock:
            step.files_left -= 1
            last = step.files_left == 0
        if last:
            self.free.put(step.buffer)

    def _fail(self, error: Exception) -> None:
        failure = Failure(getattr(error, "errno", None) or 0, f"{type(error).__name__}: {error}")
        with self._lock:
            self._answer = self._answer._replace(failure=self._answer.failure or failure)
