"""How many batches wait for the trainer, on machines of several sizes."""

from types import SimpleNamespace

import pytest

from spec_compat.pipeline.stages import prefetch as memory

GB = 10**9
# 8,192 tokens in four layers of bf16, with 40 bytes of ids, mask and places.
QWEN = 8192 * (4 * 4096 * 2 + 40)
KIMI = 8192 * (4 * 7168 * 2 + 40)
# What speculators keeps on eight ranks: float32, 12 workers with 4 batches each.
KIMI_UPSTREAM = 8 * 12 * 4 * 8192 * 4 * 7168 * 4


def machine(patch: pytest.MonkeyPatch, free: int, cores: int, shared: int | None = None) -> None:
    """`free` and `shared` in bytes; /dev/shm takes half of the memory by default."""
    there = SimpleNamespace(available=free, free=free)
    disk = SimpleNamespace(free=free // 2 if shared is None else shared)
    patch.setattr(memory.psutil, "virtual_memory", lambda: there)
    patch.setattr(memory.shutil, "disk_usage", lambda _path: disk)
    patch.setattr(memory.os, "sched_getaffinity", lambda _process: set(range(cores)))


def taken(batch_bytes: int, ranks: int) -> float:
    """GB that the ranks' loaders hold at most."""
    workers, prefetch = memory.workers_and_prefetch(batch_bytes, None, ranks)
    return ranks * workers * memory.held(prefetch) * batch_bytes / GB


def test_kimi_on_eight_ranks_takes_less_than_half_of_what_upstream_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine(monkeypatch, 2048 * GB, cores=128)
    assert round(KIMI_UPSTREAM / GB) == 361
    assert memory.workers_and_prefetch(KIMI, None, ranks=8) == (8, 2)
    assert taken(KIMI, ranks=8) == pytest.approx(150.4, abs=0.1)


@pytest.mark.parametrize("size", [32, 64, 128, 256, 512])
def test_a_smaller_machine_is_not_filled(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, size * GB, cores=128)
    assert taken(KIMI, ranks=8) <= memory.OF_SHARED * size / 2


def test_a_small_dev_shm_is_not_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, 512 * GB, cores=16, shared=64 << 20)
    assert memory.workers_and_prefetch(QWEN, None, ranks=1) == (0, 1)
    machine(monkeypatch, 512 * GB, cores=16, shared=2 * GB)
    assert 0 < taken(QWEN, ranks=1) <= 0.8 * 2


def test_16_cores_and_128_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, 120 << 30, cores=16)
    assert memory.workers_and_prefetch(QWEN, None, ranks=1) == (8, 2)
    assert taken(QWEN, ranks=1) == pytest.approx(10.75, abs=0.01)


def test_the_number_of_workers_can_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, 120 << 30, cores=16)
    assert memory.workers_and_prefetch(1 << 20, 3, ranks=1) == (3, memory.MAX_PREFETCH)
    assert memory.workers_and_prefetch(1 << 40, 3, ranks=1) == (3, 1)
    assert memory.workers_and_prefetch(1 << 40, 0, ranks=1)[0] == 0
