"""Rows on their way from vLLM's worker to the disk, while the next steps compute.

What a step left on a device waits there until the next step is launched: in between, whatever the
worker's thread does is time in which the device stands still, and a copy of the states would be in
the way of the sampled tokens. Then, on a CUDA stream of their own, the rows are proved and copied
into a host buffer; threads write those that are sound, and the buffer is free again. There is a
fixed number of buffers: with none free, the step waits.

The driver sends an order with each step, and is answered with what was written since the last.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from queue import LifoQueue
from typing import Any, NamedTuple

from spec_compat.capture.proof import contradiction, gaps

# Where nobody says how many buffers: as many as this, in bytes, holds, within these limits.
BUFFER_BYTES = 2 << 30
MIN_BUFFERS, MAX_BUFFERS = 3, 8
MAX_WRITERS = 8


class Order(NamedTuple):
    """What becomes of a step's rows: row number, token ids and loss mask by request id.

    `files` has the rows of each file; a row in none of them is computed and dropped.
    """

    directory: str
    rows: dict[str, tuple[int, list[int], list[int]]]
    files: dict[str, list[int]]


class Written(NamedTuple):
    """A file that has its final name: its rows, SHA-256 and size in bytes."""

    directory: str
    name: str
    rows: list[int]
    sha256: str
    size: int


class Refused(NamedTuple):
    """A row that failed its proof and is in no file."""

    directory: str
    row: int
    reason: str


class Answer(NamedTuple):
    """What happened since the last answer; `failure` is (errno or 0, text) of a writer."""

    written: list[Written]
    refused: list[Refused]
    failure: tuple[int, str] | None


class Place(NamedTuple):
    """Where a request's tokens lie in a step; `first` is the first one's position in the row."""

    request_id: str
    start: int
    stop: int
    first: int
    done: bool


@dataclass
class Buffer:
    """Host memory for one step, page-locked where a device copies into it; all [tokens, ...]."""

    states: list[Any]
    finite: Any
    proof: Any


@dataclass
class Step:
    """The rows of one step; they are in the buffer once `copied()` returns.

    `states` and `finite`, [tokens, ...], and `logits`, [rows, vocabulary], are on the device once
    the event `computed` is over; without a device that computes by itself it is None.
    """

    order: Order
    places: list[Place]
    buffer: Buffer
    states: list[Any]
    finite: Any
    logits: Any
    computed: Any
    sampled: list[int] = field(default_factory=list)
    copied: Callable[[], None] = lambda: None
    files_left: int = 0

    def row_number(self, place: Place) -> int:
        return self.order.rows[place.request_id][0]

    def refused(self) -> dict[int, str]:
        """Reasons by row number."""
        found = {}
        proofs = self.buffer.proof[: len(self.places)].tolist()
        for place, (gap, token), sampled in zip(self.places, proofs, self.sampled, strict=True):
            if not bool(self.buffer.finite[place.start : place.stop].all()):
                found[self.row_number(place)] = "NaN or infinity in its states"
            elif reason := contradiction(gap, token, sampled):
                found[self.row_number(place)] = reason
        return found

    def rows(self) -> dict[int, tuple[list[int], list[int], list[Any]]]:
        """Token ids, loss mask and states in the buffer, by row number."""
        return {
            row: (ids, mask, [states[place.start : place.stop] for states in self.buffer.states])
            for place in self.places
            for row, ids, mask in (self.order.rows[place.request_id],)
        }


class Sink:
    """Takes the steps of one worker; see the module. Other ranks than the first keep nothing.

    `storage.encode` makes of a step's states what is copied, `storage.write` a file of rows.
    """

    def __init__(self, capture: Any, storage: Any, *, tokens: int, buffers: int | None) -> None:
        self.capture = capture
        self.storage = storage
        self.tokens = tokens
        self.buffers = buffers
        self.order: Order | None = None
        self.step: Step | None = None  # launched
        self.computed: Step | None = None  # and its tokens sampled
        self.free: LifoQueue[Buffer] = LifoQueue()  # what was used last is warm
        self.made = 0
        writers = max(2, min(MAX_WRITERS, (os.cpu_count() or 2) // 2))
        self._writers = ThreadPoolExecutor(writers, "row-writer")
        self._side: Any = None
        self._lock = threading.Lock()
        self._answer = Answer([], [], None)

    def take(self, places: list[Place], order: Order) -> None:
        """Have computed, for the step that is launched, what is stored of it and what proves it."""
        import torch

        streams = self.capture.streams
        last = streams.taken[streams.last]
        ends = torch.tensor([place.stop - 1 for place in places]).to(last.device, non_blocking=True)
        logits = self.capture.runner.model.compute_logits(streams.norm(last[ends]))
        if not self.capture.layer_ids:
            return
        if cut := [place for place in places if place.first or not place.done]:
            raise RuntimeError(f"request {cut[0].request_id} was computed in more than one step")
        tokens = places[-1].stop
        states = [streams.taken[layer_id][:tokens] for layer_id in self.capture.layer_ids]
        # The greatest of a token's magnitudes is NaN or infinite where one of them is.
        greatest = [layer.abs().amax(dim=-1) for layer in states]
        finite = torch.stack(greatest).isfinite().all(dim=0)
        encoded = self.storage.encode(states)
        computed = torch.cuda.current_stream().record_event() if logits.is_cuda else None
        buffer = self._buffer(encoded)
        self.step = Step(order, places, buffer, encoded, finite, logits, computed)

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
            if step.computed is not None:
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

    def _buffer(self, encoded: list[Any]) -> Buffer:
        """A free buffer. All are made with the first step: to lock pages stops the device."""
        if self.buffers is None:
            size = self.tokens * sum(part[0].numel() * part.element_size() for part in encoded)
            self.buffers = min(MAX_BUFFERS, max(MIN_BUFFERS, BUFFER_BYTES // size))
        while self.made < self.buffers:
            self.free.put(self._allocated(encoded))
            self.made += 1
        return self.free.get()

    def _allocated(self, encoded: list[Any]) -> Buffer:
        import torch

        def empty(shape: tuple[int, ...], dtype: Any) -> Any:
            return torch.empty(shape, dtype=dtype, pin_memory=encoded[0].is_cuda)

        return Buffer(
            [empty((self.tokens, *part.shape[1:]), part.dtype) for part in encoded],
            empty((self.tokens,), torch.bool),
            empty((self.tokens, 2), torch.float32),
        )

    def _beside(self, step: Step) -> AbstractContextManager[Any]:
        """Where there is a device: the stream beside the model's, once the step is computed."""
        import torch

        if step.computed is None:
            return nullcontext()
        self._side = self._side or torch.cuda.Stream()
        self._side.wait_event(step.computed)
        stream: AbstractContextManager[Any] = torch.cuda.stream(self._side)
        return stream

    def _copy(self, step: Step) -> None:
        """Prove the rows, and copy all that is known of them into the buffer."""
        import torch

        device = step.logits.device
        tokens = torch.tensor(step.sampled).to(device, non_blocking=True)
        proof = gaps(step.logits, tokens)
        buffer = step.buffer
        pairs = [*zip(buffer.states, step.states, strict=True), (buffer.finite, step.finite)]
        for host, tensor in [*pairs, (buffer.proof, proof)]:
            host[: len(tensor)].copy_(tensor, non_blocking=True)
        if step.computed is not None:  # the model's stream, which made them, wants their memory
            for tensor in (*step.states, step.finite, step.logits):
                tensor.record_stream(self._side)
        step.states, step.finite, step.logits = [], None, None

    def _write_sound(self, step: Step) -> None:
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

    def _write(self, step: Step, name: str, rows: dict[int, Any]) -> None:
        try:
            if self._answer.failure is None:
                path = Path(step.order.directory, name)
                digest, size = self.storage.write(path, rows)
                written = Written(step.order.directory, name, list(rows), digest, size)
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
        failure = (getattr(error, "errno", None) or 0, f"{type(error).__name__}: {error}")
        with self._lock:
            self._answer = self._answer._replace(failure=self._answer.failure or failure)


def open_sink(worker: Any, storage: Any, **options: Any) -> None:
    """In a worker whose capture is set up: from now on steps come with orders."""
    worker._capture.sink = Sink(worker._capture, storage, **options)
    worker._capture.awaited = True


def extract(worker: Any, scheduler_output: Any, order: Order) -> Answer:
    """In a worker: compute one step, and see to its rows."""
    sink = worker._capture.sink
    sink.order = order
    try:
        output = worker.execute_model(scheduler_output)
        sink.release()  # the step before
        output = worker.sample_tokens(None) if output is None else output
        sink.sampled(output)
    finally:
        sink.order = None
    answer: Answer = sink.answer()
    return answer


def drain(worker: Any) -> Answer:
    """In a worker: wait for the last row."""
    answer: Answer = worker._capture.sink.drain()
    return answer
