"""Drives vLLM's scheduler and workers: steps of whole rows, the next ones sent while one computes.

In bf16 the states of a row can depend in their last bits on the rows that are computed beside it.
So the rows of each step are decided beforehand, and a step of which a row is missing is computed
again as it was.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count
from typing import Any

from spec_compat.capture import worker
from spec_compat.capture.orders import Answer, Order, PreparedRow, Storage

# Rows that are packed into steps together, in the order of the data.
WINDOW = 4096
# Steps that the worker has before it while it computes one.
AHEAD = 2


@dataclass(frozen=True)
class Step:
    """Rows to compute together, by number; those in `keep` are written."""

    directory: str
    rows: dict[int, PreparedRow]
    keep: list[int]


def pack(lengths: list[int], tokens: int, rows: int) -> list[list[int]]:
    """The row numbers of each step: at most `rows` rows and `tokens` tokens, few steps not full.

    Long rows first, each into the fullest step that takes it.
    """
    steps: list[list[int]] = []
    for begin in range(0, len(lengths), WINDOW):
        window: list[list[int]] = []
        rooms: list[tuple[int, int]] = []  # tokens left, and the step, in ascending order
        longest_first = sorted(
            range(begin, min(begin + WINDOW, len(lengths))), key=lambda row: -lengths[row]
        )
        for row in longest_first:
            fitting = bisect_left(rooms, (lengths[row], -1))
            if fitting == len(rooms):
                room, step = tokens, len(window)
                window.append([])
            else:
                room, step = rooms.pop(fitting)
            window[step].append(row)
            if len(window[step]) < rows:
                insort(rooms, (room - lengths[row], step))
        steps += sorted(map(sorted, window))
    return steps


class Prefill:
    """A generator of speculators whose workers hand what they compute to a storage.

    `buffers` is the number of steps whose rows the host holds; see sink.buffer_count.
    """

    # The scheduler keeps the last rows until it is asked for a further step.
    _numbers = count()

    def __init__(self, generator: Any, storage: Storage, buffers: int | None) -> None:
        self.generator = generator
        self.storage = storage
        self.tokens: int = generator.vllm_config.scheduler_config.max_num_batched_tokens
        self._call = generator.executor.collective_rpc
        self._call(worker.open_sink, args=(storage, self.tokens, buffers))

    def run(self, steps: Iterable[Step]) -> Iterator[Answer]:
        """Compute the steps; what the worker answers, as it comes.

        The last answer comes when all rows are written.
        """
        sent: deque[Future[Answer]] = deque()
        for step in steps:
            for output, numbers in self._schedule(step):
                sent.append(self._send(output, self._order(step, numbers)))
                if len(sent) > AHEAD:
                    yield sent.popleft().result()
        while sent:
            yield sent.popleft().result()
        yield self._drain()

    def _order(self, step: Step, numbers: dict[str, int]) -> Order:
        rows = {number: step.rows[number] for number in numbers.values()}
        lengths = {number: len(rows[number].ids) for number in step.keep if number in rows}
        return Order(step.directory, numbers, rows, self.storage.files(lengths))

    def _send(self, output: Any, order: Order) -> Future[Answer]:
        reply = self._call(
            worker.extract, args=(output, order), unique_reply_rank=0, non_block=True
        )
        answer: Future[Answer] = _single(reply)
        return answer

    def _drain(self) -> Answer:
        answer: Answer = _single(self._call(worker.drain, unique_reply_rank=0))
        return answer

    def _schedule(self, step: Step) -> Iterator[tuple[Any, dict[str, int]]]:
        """What the scheduler makes of a step: one, unless the KV cache is too small for it.

        With each comes the number of each row in it, by request id.
        """
        scheduler, waiting = self.generator.scheduler, dict[str, int]()
        for number, row in step.rows.items():
            request = self._request(row.ids)
            scheduler.add_request(request)
            waiting[request.request_id] = number
        while waiting:
            output = scheduler.schedule()
            if not output.total_num_scheduled_tokens:
                longest = max(len(step.rows[number].ids) for number in waiting.values())
                raise RuntimeError(f"the KV cache is too small for a row of {longest} tokens")
            yield output, {name: waiting.pop(name) for name in output.num_scheduled_tokens}

    def _request(self, ids: list[int]) -> Any:
        from speculators.data_generation import vllm_hidden_states_generator as speculators

        return speculators.Request(
            request_id=f"row_{next(self._numbers)}",
            prompt_token_ids=ids,
            sampling_params=speculators.SamplingParams(max_tokens=1, temperature=0.0),
            pooling_params=None,
            eos_token_id=self.generator.tokenizer.eos_token_id,
            arrival_time=0.0,
        )


def _single(reply: Any) -> Any:
    """The reply of one worker, which comes in a list up to vLLM 0.11.0."""
    return reply[0] if isinstance(reply, list) else reply
