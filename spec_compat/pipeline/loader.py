"""Feeds the trainer: batches of whole rows, read by worker processes."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from speculators.train.data import Eagle3SampleFileDataset, create_collate_fn
from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2
from torch.utils.data import DataLoader

from spec_compat.pipeline.stage import Job

PREFETCH_FACTOR = 4


@dataclass(frozen=True)
class Rows:
    """Files of one half of the split, with their lengths in tokens."""

    files: list[Path]
    lengths: list[int]


def loader(
    job: Job, rows: Rows, total_seq_len: int, world_size: int, rank: int, noise: Any
) -> DataLoader[Any]:
    """Batches of whole rows, packed to `total_seq_len` tokens; the same for the same seed."""
    workers = job.config.num_workers
    if workers is None:
        workers = min(12, len(os.sched_getaffinity(0)))
    dataset = Eagle3SampleFileDataset(
        total_seq_len, file_list=[str(file) for file in rows.files], transform=noise
    )
    generator = torch.Generator().manual_seed(job.config.seed + rank)
    return DataLoader(
        dataset,
        batch_sampler=MultipackDistributedBatchSamplerV2(
            batch_max_length=total_seq_len,
            # The dataset guesses lengths from file sizes; a guess too low cuts the last row off.
            lengths=rows.lengths,
            num_replicas=world_size,
            rank=rank,
            seed=job.config.seed,
        ),
        num_workers=workers,
        prefetch_factor=PREFETCH_FACTOR if workers else None,
        pin_memory=torch.cuda.is_available(),
        collate_fn=create_collate_fn(total_seq_len),
        # Workers that live for one epoch are seeded by the generator, whose state a checkpoint has:
        # a resumed epoch gets the noise that it would have had.
        generator=generator,
    )


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
