"""Drives vLLM's scheduler and workers: steps of whole rows, the next ones sent while one computes.

In bf16 the states of a row can depend in their last bits on the rows that are computed beside it.
So the rows of each step are decided beforehand, and a step of which a row is missing is computed
again as it was.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import speculators.data_generation.vllm_hidden_states_generator as speculators_generator
from vllm.sampling_params import SamplingParams

from spec_compat.patching import parameters
from spec_compat.pipeline.rows.storage import RowFiles

# Rows that are packed into steps together, in the order of the data.
WINDOW = 4096
# Steps that the worker has before it while it computes one.
AHEAD = 2


@dataclass(frozen=True)
class Step:
    """Rows to compute together: token ids and loss mask by row number; `keep` are written."""

    directory: str
    rows: dict[int, tuple[list[int], list[int]]]
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
    """A generator of speculators whose workers write what they compute."""

    # The scheduler keeps the last rows until it is asked for a further step.
    _numbers = count()

    def __init__(self, generator: Any, storage: RowFiles, buffers: int | None) -> None:
        self.generator = generator
        self.storage = storage
        self.tokens: int = generator.vllm_config.scheduler_config.max_num_batched_tokens
        generator.executor.open_sink(storage, self.tokens, buffers)

    def run(self, steps: Iterable[Step]) -> Iterator[Any]:
        """Compute the steps; what the worker answers (written, refused, failure), as it comes.

        The last answer comes when all rows are written.
        """
        sent: deque[Any] = deque()
        for step in steps:
            for output, rows in self._schedule(step):
                lengths = {number: len(ids) for number, ids, _mask in rows.values()}
                files = self.storage.files({r: lengths[r] for r in step.keep if r in lengths})
                executor = self.generator.executor
                sent.append(executor.extract(output, step.directory, rows, files))
                if len(sent) > AHEAD:
                    yield sent.popleft().result()
        while sent:
            yield sent.popleft().result()
        yield self.generator.executor.drain()

    def _schedule(self, step: Step) -> Iterator[tuple[Any, dict[str, Any]]]:
        """What the scheduler makes of a step: one, unless the KV cache is too small for it."""
        scheduler, waiting = self.generator.scheduler, {}
        for row, (ids, mask) in step.rows.items():
            request = self._request(ids)
            scheduler.add_request(request)
            waiting[request.request_id] = (row, ids, mask)
        while waiting:
            output = scheduler.schedule()
            if not output.total_num_scheduled_tokens:
                longest = max(len(ids) for _row, ids, _mask in waiting.values())
                raise RuntimeError(f"the KV cache is too small for a row of {longest} tokens")
            yield output, {name: waiting.pop(name) for name in output.num_scheduled_tokens}

    def _request(self, ids: list[int]) -> Any:
        request = speculators_generator.Request
        given = {
            "request_id": f"row_{next(self._numbers)}",
            "prompt_token_ids": ids,
            "sampling_params": SamplingParams(max_tokens=1, temperature=0.0),
            "pooling_params": None,
            "eos_token_id": self.generator.tokenizer.eos_token_id,
            "arrival_time": 0.0,
        }
        known = parameters(request)
        return request(**{name: value for name, value in given.items() if name in known})
