#!/usr/bin/env python3
"""Batches for the trainer, and the trainer on them, against speculators' own dataset and loader.

    python -m scripts.bench_loader --hidden-size 576 --rows 200 --length 500

Cases over the same rows of random states in four layers; those joined by a plus run in one process,
in turns:
  speculators   Eagle3SampleFileDataset, float32, its collate function, data_{i}.pt
  rows          this project's loader, data_{i}.pt
  shards        the same with --storage shards
  fp8, zstd     and with --storage-dtype fp8, or with --storage-compression zstd
  train-CASE    speculators' trainer on a new head of that width, fed by CASE
Batches end on the device (the GPU where there is one), as the draft head takes them: float32.
`gb_a_worker` is what a worker reads and packs in a second of its core, in GB as they are stored,
shared memory and the way to the trainer left out; `waited` is the seconds in which the trainer had
no batch.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from scripts import measure

if TYPE_CHECKING:
    from spec_compat.pipeline.rows.row import StoredRow

STORED = ("speculators", "rows", "shards", "fp8", "zstd")
TRAINED = ("train-speculators", "train-rows", "train-fp8")
JOINED = ("+".join(STORED), "+".join(TRAINED))
TTT_STEPS = 3
DRAFT_VOCAB_SIZE = 32_000
LAYERS = 4
NOISE = 0.05
STEP = 8192  # tokens of rows that are written together


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=measure.count, default=200)
    parser.add_argument("--length", type=measure.count, default=500, help="tokens of a row")
    parser.add_argument("--hidden-size", type=measure.count, default=576)
    parser.add_argument("--vocab-size", type=measure.count, default=49152)
    parser.add_argument("--batch-tokens", type=measure.count, default=4096)
    parser.add_argument("--workers", type=int, default=min(4, len(os.sched_getaffinity(0))))
    parser.add_argument("--epochs", type=measure.count, default=2)
    measure.scratch(parser)
    given = measure.options(parser, JOINED, joined=STORED + TRAINED)
    if given.case:
        run_case(given)
    records = measure.run_cases(given)
    columns = ("case", "rows", "tokens", "bytes_per_token", "seconds", "waited", "cpu_seconds")
    measure.table(records, (*columns, "tokens_per_second", "gb_a_worker", "host_mib"))
    measure.finish("loader", given, records, {**ratios(records, "seconds"), **ratios(records)})
    return any("failed" in record for record in records)


def ratios(records: list[measure.Record], of: str = "cpu_seconds") -> dict[str, float]:
    """How many times as fast each case's best turn was as the best of speculators."""
    least: dict[str, float] = {}
    for record in records:
        if of in record:
            least[record["case"]] = min(record[of], least.get(record["case"], record[of]))
    found = {}
    for case in least:
        against = "train-speculators" if case.startswith("train-") else "speculators"
        if against in least and case != against:
            found[f"{case}/{against} in {of}"] = least[against] / least[case]
    return found


def run_case(given: argparse.Namespace) -> None:
    import spec_compat  # noqa: F401

    directory = given.scratch / "loader"
    shutil.rmtree(directory, ignore_errors=True)
    turns = {case: prepared(given, case, directory / case) for case in given.case.split("+")}
    for number in range(given.epochs):
        for case, (batches, epoch, size) in turns.items():
            batches.tokens, batches.waited = 0, 0.0
            begun, cpu = time.perf_counter(), measure.cpu_seconds()
            epoch(number)
            seconds, cpu = time.perf_counter() - begun, measure.cpu_seconds() - cpu
            measure.record(
                case=case,
                epoch=number,
                rows=given.rows,
                tokens=batches.tokens,
                seconds=seconds,
                cpu_seconds=cpu,
                waited=batches.waited,
                tokens_per_second=batches.tokens / seconds,
                bytes_per_token=size / given.rows / given.length,
                gb_a_worker=size / 1e9 / reading(batches),
            )
    shutil.rmtree(directory, ignore_errors=True)
    sys.stdout.flush()
    os._exit(0)


def prepared(
    given: argparse.Namespace, case: str, directory: Path
) -> tuple[Counted, Callable[[int], None], int]:
    """A case's batches, what goes through them once, and the bytes of its rows."""
    directory.mkdir(parents=True)
    storage = case.removeprefix("train-")
    rows, size = write_rows(given, storage, directory)
    loader = speculators_loader if storage == "speculators" else ours
    batches = Counted(loader(given, rows))
    epoch = on_device(batches) if case == storage else trainer(given, batches, directory)
    return batches, epoch, size


def reading(batches: Counted) -> float:
    """CPU seconds of what a worker does for an epoch, done here."""
    begun = time.process_time()
    for rows in batches.batch_sampler:
        batches.collate_fn([batches.dataset[row] for row in rows])
    return time.process_time() - begun


class Counted:
    """Batches, of which the tokens are counted, and the seconds until each was there."""

    def __init__(self, batches: Any) -> None:
        self.tokens = 0
        self.waited = 0.0
        self._batches = batches

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        asked = time.perf_counter()
        for batch in self._batches:
            self.waited += time.perf_counter() - asked
            self.tokens += int(batch["lengths"].sum())
            yield batch
            asked = time.perf_counter()


def on_device(batches: Counted) -> Callable[[int], None]:
    """What takes every batch to the device, and nothing else."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"

    def epoch(number: int) -> None:
        for batch in batches:
            for value in batch.values():
                value.to(device, non_blocking=True)

    return epoch


def trainer(given: argparse.Namespace, batches: Counted, directory: Path) -> Callable[[int], None]:
    """Speculators' trainer, on a new head for a verifier of this width."""
    from speculators.train.trainer import Trainer, TrainerConfig

    from spec_compat.pipeline.inputs.verifier import Verifier
    from spec_compat.pipeline.stages.training import draft_head

    model = str(verifier(given, directory / "verifier"))
    job: Any = SimpleNamespace(
        verifier=Verifier(model),
        config=SimpleNamespace(
            model=model,
            layer_ids=(2, 4, 5, 7),
            ttt_steps=TTT_STEPS,
            num_layers=1,
            draft_heads=None,
            draft_kv_heads=None,
            draft_head_dim=None,
            draft_intermediate_size=None,
        ),
        layout=SimpleNamespace(vocab_mapping=directory / "verifier"),
    )
    call = {"ttt_steps": TTT_STEPS, "ttt_step_loss_decay": 1.0, "use_off_policy_tokens": False}
    options = TrainerConfig(1e-4, given.epochs, str(directory / "heads"), train_call_kwargs=call)
    epoch: Callable[[int], None] = Trainer(draft_head(job), options, batches).train_epoch
    return epoch


def verifier(given: argparse.Namespace, directory: Path) -> Path:
    """What a head takes from its verifier, and a mapping of every token that it can draft."""
    import numpy as np
    import torch
    from safetensors.torch import save_file

    from scripts.bench_extract import write_model

    width, tokens = given.hidden_size, given.vocab_size
    head_dim = 128 if width >= 2048 else 64
    heads = {"num_attention_heads": width // head_dim, "num_key_value_heads": width // head_dim}
    shape = {"hidden_size": width, "intermediate_size": 3 * width, "head_dim": head_dim, **heads}
    positions = {"num_hidden_layers": 8, "max_position_embeddings": 8192}
    write_model(directory, {**shape, **positions, "vocab_size": tokens})
    weights = {
        "model.embed_tokens.weight": 0.02 * torch.randn(tokens, width).bfloat16(),
        "lm_head.weight": 0.02 * torch.randn(tokens, width).bfloat16(),
        "model.norm.weight": torch.ones(width).bfloat16(),
    }
    save_file(weights, directory / "model.safetensors")
    drafted = min(DRAFT_VOCAB_SIZE, tokens)
    np.save(directory / "d2t.npy", np.zeros(drafted, np.int64))
    np.save(directory / "t2d.npy", np.arange(tokens) < drafted)
    return directory


def write_rows(
    given: argparse.Namespace, case: str, directory: Path
) -> tuple[list[StoredRow], int]:
    """The rows' names and the bytes they take."""
    import torch

    from spec_compat.capture.orders import EncodedRow
    from spec_compat.pipeline.rows import storage
    from spec_compat.pipeline.rows.row import RowRef, StoredRow

    kinds = {
        "shards": storage.Shards(),
        "fp8": storage.Shards(fp8=True),
        "zstd": storage.Shards(compressed=True),
    }
    writer = kinds.get(case, storage.RowFiles())
    length, size = given.length, 0
    stored: dict[int, StoredRow] = {}
    tokens = max(STEP, length)
    encoded = writer.encode(
        [torch.randn(tokens, given.hidden_size).bfloat16() for _ in range(LAYERS)]
    )
    for begin in range(0, given.rows, max(1, STEP // length)):
        step = list(range(begin, min(given.rows, begin + max(1, STEP // length))))
        content = {
            row: EncodedRow(
                [1] * length,
                [1] * length,
                [part[place * length : (place + 1) * length] for part in encoded],
            )
            for place, row in enumerate(step)
        }
        for name, rows in writer.files(dict.fromkeys(step, length)).items():
            size += writer.write(directory / name, {row: content[row] for row in rows}).size
            for row in rows:
                stored[row] = StoredRow(RowRef("rows", row), directory / name, length)
    return [stored[row] for row in range(given.rows)], size


def ours(given: argparse.Namespace, rows: list[StoredRow]) -> Any:
    from spec_compat.pipeline.stages.loader import loader

    job: Any = SimpleNamespace(config=SimpleNamespace(num_workers=given.workers, seed=0))
    return loader(job, rows, given.batch_tokens, 1, 0, NOISE)


def speculators_loader(given: argparse.Namespace, rows: list[StoredRow]) -> Any:
    """As its training script has it, but for the number of workers."""
    import torch
    from speculators.train.data import Eagle3SampleFileDataset, create_collate_fn
    from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2
    from speculators.train.noise_transforms import AddUniformNoise
    from torch.utils.data import DataLoader

    dataset = Eagle3SampleFileDataset(
        given.batch_tokens,
        file_list=[str(row.file) for row in rows],
        transform=AddUniformNoise(NOISE),
    )
    return DataLoader(
        dataset,
        batch_sampler=MultipackDistributedBatchSamplerV2(
            batch_max_length=given.batch_tokens,
            lengths=[given.length] * len(rows),
            num_replicas=1,
            rank=0,
        ),
        num_workers=given.workers,
        prefetch_factor=4 if given.workers else None,
        pin_memory=torch.cuda.is_available(),
        collate_fn=create_collate_fn(given.batch_tokens),
        persistent_workers=given.workers > 0,
    )


if __name__ == "__main__":
    sys.exit(main())
