"""The loader's batches are those of speculators' own dataset, from every storage."""

import signal
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

import spec_compat  # noqa: F401
from spec_compat.capture.orders import EncodedRow
from spec_compat.errors import UserError
from spec_compat.pipeline.rows import storage
from spec_compat.pipeline.rows.index import Index
from spec_compat.pipeline.rows.row import Row, RowRef, StoredRow
from spec_compat.pipeline.rows.store import stored
from spec_compat.pipeline.stages import loader, prefetch as room
from speculators.train.data import Eagle3SampleFileDataset, create_collate_fn
from speculators.train.noise_transforms import AddUniformNoise

pytestmark = [pytest.mark.live]

LENGTHS = [70, 33, 128, 5, 64]
LENGTH, HIDDEN, LAYERS = 128, 16, 4
STATES = ("hidden_states", "verifier_last_hidden_states")


def write(directory: Path, kind: storage.RowFiles) -> list[StoredRow]:
    draw = torch.Generator().manual_seed(0)
    directory.mkdir()
    total = sum(LENGTHS)
    sizes = 10.0 ** (torch.arange(total) % 7 - 3)[:, None]  # first tokens are often 1,000 times
    states = [torch.randn(total, HIDDEN, generator=draw) * sizes for _ in range(LAYERS)]
    states = [layer.bfloat16() for layer in states]
    encoded, begin = kind.encode(states), 0
    content: dict[int, EncodedRow] = {}
    for row, length in enumerate(LENGTHS):
        part = [tensor[begin : begin + length] for tensor in encoded]
        content[row] = EncodedRow(list(range(length)), [i % 2 for i in range(length)], part)
        begin += length
    files = kind.files(dict(enumerate(LENGTHS)))
    for name, rows in files.items():
        kind.write(directory / name, {row: content[row] for row in rows})
    holders = {row: directory / name for name, rows in files.items() for row in rows}
    return [StoredRow(RowRef("d", n), holders[n], length) for n, length in enumerate(LENGTHS)]


def load(row: StoredRow) -> Row:
    return storage.load(row.file, row.ref.number)


def batches(rows: list[StoredRow], workers: int = 0) -> list[loader.Batch]:
    job: Any = SimpleNamespace(config=SimpleNamespace(num_workers=workers, seed=0))
    return list(loader.loader(job, rows, LENGTH, 1, 0, 0))


def theirs(rows: list[StoredRow]) -> list[dict[str, Any]]:
    dataset = Eagle3SampleFileDataset(LENGTH, file_list=[str(row.file) for row in rows])
    job: Any = SimpleNamespace(config=SimpleNamespace(num_workers=0, seed=0))
    ours = loader.loader(job, rows, LENGTH, 1, 0, 0)
    collate = create_collate_fn(LENGTH)
    return [collate([dataset[place] for place in places]) for places in ours.batch_sampler]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[StoredRow]:
    return write(tmp_path_factory.mktemp("loader") / "rows", storage.RowFiles())


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_those_of_speculators_dataset(workers: int, rows: list[StoredRow]) -> None:
    ours, expected = batches(rows, workers), theirs(rows)
    assert len(ours) == len(expected) > 1
    for mine, reference in zip(ours, expected, strict=True):
        assert mine.keys() == reference.keys()
        for name, tensor in reference.items():
            assert mine[name].dtype == tensor.dtype, name
            assert torch.equal(mine[name], tensor), name


def order(rows: list[StoredRow], seed: int = 0) -> list[list[int]]:
    """The places of the rows of each batch."""
    job: Any = SimpleNamespace(config=SimpleNamespace(num_workers=0, seed=seed))
    return [list(places) for places in loader.loader(job, rows, LENGTH, 1, 0, 0).batch_sampler]


def test_no_batch_has_rows_of_more_tokens_than_it_holds(rows: list[StoredRow]) -> None:
    """Its last row would be cut without a word."""
    given = [rows[0]._replace(length=length) for length in (64, 65, 64, 65)]
    for places in order(given):
        assert sum(given[place].length for place in places) <= LENGTH


def test_another_seed_is_another_order(rows: list[StoredRow]) -> None:
    assert order(rows * 4, seed=1) == order(rows * 4, seed=1) != order(rows * 4, seed=2)


def test_batches_of_float32_rows_stay_what_they_are_too(
    rows: list[StoredRow], tmp_path: Path
) -> None:
    single = [row._replace(file=tmp_path / row.file.name) for row in rows]
    for row, copy in zip(rows, single, strict=True):
        content = load(row)
        states = [layer.float() for layer in content.hidden_states]
        ids, mask = content.input_ids, content.loss_mask
        torch.save({"input_ids": ids, "loss_mask": mask, "hidden_states": states}, copy.file)
    for mine, reference in zip(batches(single), batches(rows), strict=True):
        assert all(torch.equal(mine[name], reference[name]) for name in STATES)


def test_a_batch_stays_what_it_is_while_it_is_in_use(rows: list[StoredRow]) -> None:
    """Workers write into memory that earlier batches had: a slow trainer must not see it."""
    many = rows * 12
    job: Any = SimpleNamespace(config=SimpleNamespace(num_workers=1, seed=0))
    alone: Any = SimpleNamespace(config=SimpleNamespace(num_workers=0, seed=0))
    expected = list(loader.loader(alone, many, LENGTH, 1, 0, 0))
    found = loader.loader(job, many, LENGTH, 1, 0, 0)
    for batch, reference in zip(iter(found._batches), expected, strict=True):
        time.sleep(0.02)  # as long as the worker takes to make all that it may
        for name, layers in zip(STATES, (LAYERS - 1, 1), strict=True):
            assert torch.equal(loader.unpack(batch[name], layers), reference[name])
    assert len(expected) > 4 * room.MAX_PREFETCH


def test_the_trainer_waits_for_the_first_batch_alone_when_it_is_the_slower(
    rows: list[StoredRow], monkeypatch: pytest.MonkeyPatch
) -> None:
    many = rows * 4
    read, read_seconds = storage.load, 0.05

    def slowly(file: Path, number: int) -> Row:
        time.sleep(read_seconds)
        return read(file, number)

    monkeypatch.setattr(storage, "load", slowly)

    def waited(workers: int) -> tuple[float, int]:
        job: Any = SimpleNamespace(config=SimpleNamespace(num_workers=workers, seed=0))
        found = loader.loader(job, many, LENGTH, 1, 0, 0)
        first = 0.0
        for _batch in found:
            first = first or found.waited  # a busy machine takes its time to begin a worker
            time.sleep(0.3)  # computes longer than the two rows of a batch take to be read
        return found.waited - first, len(found)

    alone, batches_read = waited(0)
    assert alone > read_seconds * 0.8 * len(many)
    assert waited(1)[0] < alone / 2
    assert batches_read > 8


def test_a_worker_that_hangs_ends_the_training(
    rows: list[StoredRow], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = storage.load

    def hang(file: Path, number: int) -> Row:
        if torch.utils.data.get_worker_info() is not None:
            time.sleep(60)
        return read(file, number)

    monkeypatch.setattr(loader, "STALLED", 2)
    monkeypatch.setattr(storage, "load", hang)
    with pytest.raises(RuntimeError, match="timed out after 2 seconds"):
        batches(rows, 1)


def test_a_batch_that_cannot_be_handed_over_ends_it_in_one_line(
    rows: list[StoredRow], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the socket for it cannot be made, both sides waited for ever."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it waits for ever"))
    signal.alarm(60)
    try:
        with pytest.raises(UserError, match=r"FileNotFoundError.*make space in /dev/shm and") as it:
            batches(rows, 1)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert "\n" not in str(it.value)


def test_where_there_is_no_shared_memory_it_says_so(
    rows: list[StoredRow], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch says it in a /dev/shm of 100 kB."""

    def share_memory_(tensor: torch.Tensor) -> None:
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: Success (0)")

    monkeypatch.setattr(torch.Tensor, "share_memory_", share_memory_)
    with pytest.raises(UserError, match=r"\(RuntimeError: unable to .*make space in /dev/shm and"):
        batches(rows, 1)


def test_a_file_beside_a_shard_is_not_read_for_a_row_of_it(tmp_path: Path) -> None:
    """A `data_{i}.pt` of somebody else, or of a run in another storage."""
    row = write(tmp_path / "shards", storage.Shards())[1]
    index = Index(row.file.parent)
    index.add(row.file.name, "0" * 64, {row.ref.number: row.length})
    other = write(tmp_path / "rows", storage.RowFiles())[0]
    (row.file.parent / "data_1.pt").write_bytes(other.file.read_bytes())
    (found,) = stored(row.file.parent)
    assert len(load(found).input_ids) == LENGTHS[1] != LENGTHS[0]


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize(("fp8", "tolerance"), [(False, 0.0), (True, 0.04)])
def test_shards_give_the_same_batches(
    fp8: bool, tolerance: float, compressed: bool, rows: list[StoredRow], tmp_path: Path
) -> None:
    sharded = write(tmp_path / "shards", storage.Shards(fp8, compressed))
    for mine, reference in zip(batches(sharded), batches(rows), strict=True):
        for name, tensor in reference.items():
            if name in STATES:  # of each token, however small it is beside others
                off = (mine[name] - tensor).norm(dim=-1)
                assert (off <= tolerance * tensor.norm(dim=-1)).all()
            else:
                assert torch.equal(mine[name], tensor), name


@pytest.mark.parametrize("compressed", [False, True])
def test_a_shard_that_is_cut_is_refused(compressed: bool, tmp_path: Path) -> None:
    """What is mapped and not there would kill the process that reads it."""
    sharded = write(tmp_path / "shards", storage.Shards(compressed=compressed))
    shard = sharded[0].file
    whole = shard.read_bytes()
    for end in (0, 7, 100, len(whole) // 2, len(whole) - 1):
        shard.write_bytes(whole[:end])
        with pytest.raises(SafetensorError):
            load(sharded[0])


def test_every_number_of_fp8_is_decoded_as_torch_does() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    finite = codes[codes.view(storage.FP8).float().isfinite()]
    scale = torch.tensor([3.7e-3])
    assert len(finite) == 254
    tokens = loader.BLOCK // len(finite) + 3  # a block and a part of one
    packed = torch.cat([finite, scale.view(torch.uint8)]).repeat(1, tokens, 1)
    expected = finite.view(storage.FP8).float() * scale
    assert torch.equal(loader.unpack(packed, 1), expected.expand(1, tokens, -1))


def test_noise_is_that_of_speculators_and_on_the_head_s_input_alone(rows: list[StoredRow]) -> None:
    job: Any = SimpleNamespace(config=SimpleNamespace(num_workers=0, seed=0))
    reference = batches(rows)
    torch.manual_seed(0)
    noisy = list(loader.loader(job, rows, LENGTH, 1, 0, 0.05))
    torch.manual_seed(0)
    for mine, plain in zip(noisy, reference, strict=True):
        assert torch.equal(mine[STATES[0]], AddUniformNoise(0.05).transform(plain[STATES[0]]))
        assert torch.equal(mine[STATES[1]], plain[STATES[1]])
