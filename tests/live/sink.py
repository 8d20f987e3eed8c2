"""Extracts through the sink, in every way that a test asks about, and prints what came of it."""

import ctypes
import errno
import gc
import json
import random
import re
import resource
import sys
import tempfile
import time
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

import spec_compat  # noqa: F401
from spec_compat.capture.orders import Answer, EncodedRow, PreparedRow, Written
from spec_compat.capture.prefill import Prefill, Step, pack
from spec_compat.pipeline.rows import storage
from speculators.data_generation.vllm_hidden_states_generator import VllmHiddenStatesGenerator

SLEEP = 0.2


class Slow(storage.RowFiles):
    """A disk that takes its time."""

    def write(self, path: Path, rows: Mapping[int, EncodedRow]) -> Written:
        time.sleep(SLEEP)
        return super().write(path, rows)


class Full(storage.RowFiles):
    """A disk that has no room for one of the rows."""

    def write(self, path: Path, rows: Mapping[int, EncodedRow]) -> Written:
        if path.name == "data_7.pt":
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(path, rows)


class Ahead:
    """How many steps sent before have no answer yet, each time that the driver sends one."""

    def __init__(self, executor: Any) -> None:
        self.counts: list[int] = []
        self._sent: list[Any] = []
        self._send = executor.collective_rpc
        executor.collective_rpc = self

    def __call__(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        reply = self._send(method, *args, **kwargs)
        if kwargs.get("non_block"):
            self.counts.append(sum(not future.done() for future in self._sent))
            self._sent.append(reply)
        return reply


def buffers(worker: Any) -> int:
    return int(worker._capture.sink.made)


def peak(worker: Any) -> int:
    """Most bytes that the worker has held so far, with what its allocator keeps for later."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def held(worker: Any) -> tuple[int, int]:
    """Bytes that the worker has from malloc and has not given back, and Python's own blocks."""
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.fopen.restype = ctypes.c_void_p
    with tempfile.NamedTemporaryFile("r") as told:
        stream = ctypes.c_void_p(libc.fopen(told.name.encode(), b"w"))
        libc.malloc_info(0, stream)
        libc.fclose(stream)
        total = told.read().rpartition("</heap>")[2]
    sizes = dict(re.findall(r'<\w+ type="(\w+)" (?:count="\d+" )?size="(\d+)"', total))
    free = int(sizes["fast"]) + int(sizes["rest"])
    return int(sizes["current"]) - free + int(sizes["mmap"]), sys.getallocatedblocks()


class Extraction:
    def __init__(self, generator: Any, directory: Path) -> None:
        self.generator = generator
        self.directory = directory

    def run(
        self,
        rows: list[PreparedRow],
        kind: storage.RowFiles,
        most: int = 256,
        buffers: int | None = None,
    ) -> tuple[list[list[int]], list[Answer]]:
        """The steps, and the worker's answers."""
        prefill = Prefill(self.generator, kind, buffers)
        steps = pack([len(ids) for ids, _mask in rows], prefill.tokens, most)
        given = (Step(str(self.directory), {r: rows[r] for r in step}, step) for step in steps)
        return steps, list(prefill.run(given))

    def written(self, answers: list[Answer]) -> dict[str, list[int]]:
        return {file.name: file.rows for answer in answers for file in answer.written}


def random_rows(count: int, longest: int) -> list[PreparedRow]:
    draw = random.Random(0)
    lengths = [draw.randint(1, longest) for _ in range(count)]
    return [
        PreparedRow(
            [draw.randrange(3, 512) for _ in range(n)], [draw.randrange(2) for _ in range(n)]
        )
        for n in lengths
    ]


def differing(
    generator: Any, rows: list[PreparedRow], steps: list[list[int]], directory: Path
) -> list[int]:
    """Rows whose file is not what generate() returns for the rows of its step."""
    wrong = []
    for step in steps:
        for row, result in zip(step, generator.generate([rows[r][0] for r in step]), strict=True):
            there = storage.load(directory / f"data_{row}.pt", row)
            pairs = zip(there.hidden_states, result["hidden_states"], strict=True)
            same = all(torch.equal(ours, theirs) for ours, theirs in pairs)
            ids, mask = there.input_ids.tolist(), there.loss_mask.tolist()
            wrong += [] if same and (ids, mask) == rows[row] else [row]
    return wrong


def main(model: str, root: Path) -> None:
    from planted import plant, unplant  # the script beside this one

    generator = VllmHiddenStatesGenerator(model, layer_ids=[2, 4, 5, 7], max_model_len=512)
    worker = generator.executor.collective_rpc
    found: dict[str, Any] = {}

    def extraction(name: str) -> Extraction:
        (root / name).mkdir()
        return Extraction(generator, root / name)

    # First, so that nothing larger has been there before.
    flat = extraction("flat")
    many = random_rows(10_000, 80)
    for count in (1_000, len(many)):
        flat.run(many[:count], storage.Shards(), buffers=3)
        driver = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        found[f"peak after {count}"] = [*worker(peak), driver]
        (found[f"held after {count}"],) = worker(held)

    rows = random_rows(120, 511)
    plain = extraction("rows")
    ahead = Ahead(generator.executor)
    steps, answers = plain.run(rows, storage.RowFiles())
    generator.executor.collective_rpc = worker
    found["ahead"], found["buffers"] = ahead.counts, worker(buffers)
    found["tokens"] = [sum(len(rows[row][0]) for row in step) for step in steps]
    found["written"] = sorted(row for part in plain.written(answers).values() for row in part)
    found["digests"] = {file.name: file.sha256 for answer in answers for file in answer.written}
    found["differing"] = differing(generator, rows, steps, plain.directory)
    at_once = [list(range(len(rows)))]
    found["differing at once"] = differing(generator, rows, at_once, plain.directory)

    for name, options in (("shards", {}), ("fp8", {"fp8": True}), ("zstd", {"compressed": True})):
        _steps, answers = extraction(name).run(rows, storage.Shards(**options))
        found[name] = {file.name: file.rows for answer in answers for file in answer.written}

    for fault in ("not_finite", "last_of_another"):
        worker(plant, args=(fault,))
        bad = extraction(fault)
        steps, answers = bad.run(rows[:20], storage.RowFiles(), most=10)
        worker(unplant)
        found[fault] = {
            "last of step": [step[-1] for step in steps],
            "refused": {row.row: row.reason for answer in answers for row in answer.refused},
            "written": sorted(row for part in bad.written(answers).values() for row in part),
        }

    _steps, answers = extraction("full").run(rows[:20], Full())
    found["failure"] = answers[-1].failure

    short = random_rows(60, 8)
    begun = time.monotonic()
    steps, answers = extraction("slow").run(short, Slow(), most=4, buffers=2)
    seconds = time.monotonic() - begun
    computed = accumulate(len(step) for step in steps)
    written = accumulate(sum(len(file.rows) for file in answer.written) for answer in answers)
    behind = [rows - there for rows, there in zip(computed, written, strict=False)]
    found["slow"] = {"seconds": seconds, "buffers": worker(buffers), "behind": behind}

    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
