"""The loader's batches are those of speculators' own dataset, from every storage."""

import signal
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import spec_compat  # noqa: F401
from spec_compat.errors import UserError
from spec_compat.pipeline import loader, storage
from speculators.train.data import Eagle3SampleFileDataset, create_collate_fn

pytestmark = [pytest.mark.live]

LENGTHS = [70, 33, 128, 5, 64]
LENGTH, HIDDEN, LAYERS = 128, 16, 4
STATES = ("hidden_states", "verifier_last_hidden_states")


def write(directory: Path, kind: storage.RowFiles) -> list[Path]:
    draw = torch.Generator().manual_seed(0)
    directory.mkdir()
    total = sum(LENGTHS)
    states = [torch.randn(total, HIDDEN, generator=draw).bfloat16() * 9 for _ in range(LAYERS)]
    encoded, begin = kind.encode(states), 0
    content: dict[int, storage.Content] = {}
    for row, length in enumerate(LENGTHS):
        part = [tensor[begin : begin + length] for tensor in encoded]
        content[row] = list(range(length)), [i % 2 for i in range(length)], part
        begin += length
    files = kind.files(dict(enumerate(LENGTHS)))
    for name, rows in files.items():
        kind.write(directory / name, {row: content[row] for row in rows})
    if kind.lists:
        shards = {str(row): name for name, rows in files.items() for row in rows}
        (directory / storage.INDEX).write_text(f'{{"rows": {shards}}}'.replace("'", '"'))
    return [directory / f"data_{row}.pt" for row in range(len(LENGTHS))]


def batches(files: list[Path], workers: int = 0) -> list[dict[str, Any]]:
    job: Any = SimpleNamespace(config=SimpleNamespace(num_workers=workers, seed=0))
    return list(loader.loader(job, loader.Rows(files, LENGTHS), LENGTH, 1, 0, None))


def theirs(files: list[Path]) -> list[dict[str, Any]]:
    dataset = Eagle3SampleFileDataset(LENGTH, file_list=[str(file) for file in files])
    job: Any = SimpleNamespace(config=SimpleNamespace(num_workers=0, seed=0))
    ours = loader.loader(job, loader.Rows(files, LENGTHS), LENGTH, 1, 0, None)
    collate = create_collate_fn(LENGTH)
    return [collate([dataset[row] for row in rows]) for rows in ours.batch_sampler]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write(tmp_path_factory.mktemp("loader") / "rows", storage.RowFiles())


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_those_of_speculators_dataset(workers: int, files: list[Path]) -> None:
    ours, expected = batches(files, workers), theirs(files)
    assert len(ours) == len(expected) > 1
    for mine, reference in zip(ours, expected, strict=True):
        assert mine.keys() == reference.keys()
        for name, tensor in reference.items():
            assert mine[name].dtype == tensor.dtype, name
            assert torch.equal(mine[name], tensor), name


def test_a_batch_that_cannot_be_handed_over_ends_it_in_one_line(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the socket for it cannot be made, both sides waited for ever."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it waits for ever"))
    signal.alarm(60)
    try:
        with pytest.raises(UserError, match=r"FileNotFoundError.*make space in /dev/shm and") as it:
            batches(files, 1)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert "\n" not in str(it.value)


def test_where_there_is_no_shared_memory_it_says_so(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch says it in a /dev/shm of 100 kB."""

    def share_memory_(tensor: torch.Tensor) -> None:
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: Success (0)")

    monkeypatch.setattr(torch.Tensor, "share_memory_", share_memory_)
    with pytest.raises(UserError, match=r"\(RuntimeError: unable to .*make space in /dev/shm and"):
        batches(files, 1)


def test_a_file_beside_a_shard_is_not_read_for_a_row_of_it(tmp_path: Path) -> None:
    """A `data_{i}.pt` of somebody else, or of a run in another storage."""
    files = write(tmp_path / "shards", storage.Shards())
    other = write(tmp_path / "rows", storage.RowFiles())[0]
    files[1].write_bytes(other.read_bytes())
    assert len(storage.load(files[1])["input_ids"]) == LENGTHS[1] != LENGTHS[0]


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize(("fp8", "tolerance"), [(False, 0.0), (True, 0.04)])
def test_shards_give_the_same_batches(
    fp8: bool, tolerance: float, compressed: bool, files: list[Path], tmp_path: Path
) -> None:
    sharded = write(tmp_path / "shards", storage.Shards(fp8, compressed))
    for mine, reference in zip(batches(sharded), batches(files), strict=True):
        for name, tensor in reference.items():
            if name in STATES:
                assert float((mine[name] - tensor).norm() / tensor.norm()) <= tolerance
            else:
                assert torch.equal(mine[name], tensor), name


def test_noise_is_added_where_the_head_is_and_to_its_input_alone(files: list[Path]) -> None:
    class Noise:
        def transform(self, tensor: torch.Tensor) -> torch.Tensor:
            return tensor + 1

    job: Any = SimpleNamespace(config=SimpleNamespace(num_workers=0, seed=0))
    noisy = loader.loader(job, loader.Rows(files, LENGTHS), LENGTH, 1, 0, Noise())
    for mine, reference in zip(noisy, batches(files), strict=True):
        assert torch.equal(mine[STATES[0]], reference[STATES[0]] + 1)
        assert torch.equal(mine[STATES[1]], reference[STATES[1]])


def test_batches_in_waiting_fit_into_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kimi's batch, 470 MB, on eight ranks: upstream's 12 workers of 4 would take 361 GB."""
    memory = SimpleNamespace(available=64 << 30, free=64 << 30)
    monkeypatch.setattr(loader.psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(loader.shutil, "disk_usage", lambda _path: memory)
    batch = 8192 * 4 * 7168 * 2
    workers, prefetch = loader.room(batch, None, ranks=8)
    assert 8 * workers * prefetch * 2 * batch <= 32 << 30
    assert loader.room(1 << 20, 3, ranks=1) == (3, loader.MAX_PREFETCH)
    assert loader.room(1 << 40, None, ranks=1) == (0, 1)
