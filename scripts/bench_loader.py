#!/usr/bin/env python3
"""Batches for the trainer, and bytes on the disk, against speculators' own dataset and loader.

    python scripts/bench_loader.py --hidden-size 576 --rows 200 --length 500

Cases, each in a process of its own, over the same rows of random states in four layers:
  speculators   Eagle3SampleFileDataset, float32, its collate function, data_{i}.pt
  rows          this project's loader, data_{i}.pt
  shards, fp8   the same with --storage shards, and with --storage-dtype fp8
Batches end on the device (the GPU where there is one), as the draft head takes them: float32.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import measure

CASES = ("speculators", "rows", "shards", "fp8")
LAYERS = 4
STEP = 8192  # tokens of rows that are written together


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--length", type=int, default=500, help="tokens of a row")
    parser.add_argument("--hidden-size", type=int, default=576)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--workers", type=int, default=min(4, len(os.sched_getaffinity(0))))
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--directory", type=Path, default=Path("/tmp/spec-compat-bench"))  # noqa: S108
    given = measure.options(parser, CASES)
    if given.case:
        run_case(given)
    records = measure.run_cases(given)
    columns = ("case", "rows", "tokens", "seconds", "tokens_per_second", "bytes_per_token")
    measure.table(records, (*columns, "host_mib"))
    best: dict[str, float] = {}
    for record in records:
        best[record["case"]] = max(best.get(record["case"], 0), record.get("tokens_per_second", 0))
    theirs = best.get("speculators")
    ratios = {f"{case}/speculators": best[case] / theirs for case in best if theirs}
    measure.finish("loader", given, records, ratios)
    return any("failed" in record for record in records)


def run_case(given: argparse.Namespace) -> None:
    import spec_compat  # noqa: F401

    directory = given.directory / "loader"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    files, size = write_rows(given, directory)
    batches = (
        speculators_loader(given, files) if given.case == "speculators" else ours(given, files)
    )
    tokens = given.rows * given.length
    for epoch in range(given.epochs):
        begun = time.perf_counter()
        count = sum(int(batch["lengths"].sum()) for batch in batches)
        seconds = time.perf_counter() - begun
        measure.record(
            epoch=epoch,
            rows=given.rows,
            tokens=count,
            seconds=seconds,
            tokens_per_second=count / seconds,
            bytes_per_token=size / tokens,
        )
    shutil.rmtree(directory, ignore_errors=True)
    sys.stdout.flush()
    os._exit(0)


def write_rows(given: argparse.Namespace, directory: Path) -> tuple[list[Path], int]:
    """The rows' names and the bytes they take."""
    import json

    import torch

    from spec_compat.pipeline import storage

    kind = {"shards": storage.Shards(), "fp8": storage.Shards(fp8=True)}
    writer = kind.get(given.case, storage.RowFiles())
    length, size = given.length, 0
    shards: dict[str, str] = {}
    for begin in range(0, given.rows, max(1, STEP // length)):
        step = list(range(begin, min(given.rows, begin + max(1, STEP // length))))
        states = [
            torch.randn(len(step) * length, given.hidden_size).bfloat16() for _ in range(LAYERS)
        ]
        encoded = writer.encode(states)
        content = {
            row: (
                [1] * length,
                [1] * length,
                [part[place * length : (place + 1) * length] for part in encoded],
            )
            for place, row in enumerate(step)
        }
        for name, rows in writer.files(dict.fromkeys(step, length)).items():
            size += writer.write(directory / name, {row: content[row] for row in rows})[1]
            shards |= {str(row): name for row in rows}
    if writer.lists:
        (directory / storage.INDEX).write_text(json.dumps({"rows": shards}))
    return [directory / f"data_{row}.pt" for row in range(given.rows)], size


def ours(given: argparse.Namespace, files: list[Path]) -> Iterable[dict[str, Any]]:
    from speculators.train.noise_transforms import AddUniformNoise

    from spec_compat.pipeline.loader import Rows, loader

    job: Any = SimpleNamespace(config=SimpleNamespace(num_workers=given.workers, seed=0))
    rows = Rows(files, [given.length] * len(files))
    return loader(job, rows, given.batch_tokens, 1, 0, AddUniformNoise(0.05))


def speculators_loader(given: argparse.Namespace, files: list[Path]) -> Iterable[dict[str, Any]]:
    """As its training script has it, but for the number of workers."""
    import torch
    from speculators.train.data import Eagle3SampleFileDataset, create_collate_fn
    from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2
    from speculators.train.noise_transforms import AddUniformNoise
    from torch.utils.data import DataLoader

    dataset = Eagle3SampleFileDataset(
        given.batch_tokens, file_list=[str(f) for f in files], transform=AddUniformNoise(0.05)
    )
    batches = DataLoader(
        dataset,
        batch_sampler=MultipackDistributedBatchSamplerV2(
            batch_max_length=given.batch_tokens,
            lengths=[given.length] * len(files),
            num_replicas=1,
            rank=0,
        ),
        num_workers=given.workers,
        prefetch_factor=4 if given.workers else None,
        pin_memory=torch.cuda.is_available(),
        collate_fn=create_collate_fn(given.batch_tokens),
        persistent_workers=given.workers > 0,
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"

    class OnDevice:
        def __iter__(self) -> Any:
            for batch in batches:
                yield {name: value.to(device, non_blocking=True) for name, value in batch.items()}

    return OnDevice()


if __name__ == "__main__":
    sys.exit(main())
