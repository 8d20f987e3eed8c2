"""How many loader processes each rank starts, and how many batches each of them prefetches."""

from __future__ import annotations

import os
import shutil

import psutil

from spec_compat.pipeline.system.processes import SHARED

# One reads more than a disk of 2 GB/s gives; of zstd, a quarter of a GB/s (docs/benchmarks.md).
MAX_WORKERS = 8
MAX_PREFETCH = 2
# Shares of the free memory, and of what /dev/shm takes, that batches in waiting may fill.
OF_MEMORY, OF_SHARED = 0.5, 0.8


def workers_and_prefetch(batch_bytes: int, workers: int | None, ranks: int) -> tuple[int, int]:
    """Worker processes of a rank, and the batches that each may have ready."""
    memory = psutil.virtual_memory()
    shared = shutil.disk_usage(SHARED).free if SHARED.is_dir() else memory.free
    free = min(OF_MEMORY * memory.available, OF_SHARED * shared)
    batches = int(free / ranks / batch_bytes)
    if workers is None:
        cores = max(1, len(os.sched_getaffinity(0)) // ranks)
        workers = min(MAX_WORKERS, cores, batches // held(1))
    most = batches // max(1, workers)
    return workers, max(p for p in range(1, MAX_PREFETCH + 1) if p == 1 or held(p) <= most)


def held(prefetch: int) -> int:
    """Batches in memory for each worker: those ready, as many page-locked, and one in use."""
    return 2 * prefetch + 1
