"""What the sink writes is what generate() returns; what it may not write has no name; nothing
grows with the number of rows."""

import hashlib
import json
import math
import random
import re
from pathlib import Path
from typing import Any

import pytest

from spec_compat.pipeline.rows import storage
from tests.conftest import run_script
from tests.live.sink import SLEEP, random_rows

pytestmark = [pytest.mark.live, pytest.mark.slow]

ROWS = random_rows(120, 511)
Found = tuple[dict[str, Any], Path]


@pytest.fixture(scope="module")
def found(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Found:
    root = tmp_path_factory.mktemp("sink")
    printed = run_script(Path(__file__).with_name("sink.py"), tiny_llama, root)
    return json.loads(next(line for line in printed.splitlines() if line[:1] == "{")), root


def test_every_row_is_what_generate_returns_for_the_rows_of_its_step(found: Found) -> None:
    assert found[0]["written"] == list(range(len(ROWS)))
    assert found[0]["differing"] == []


def test_generate_returns_the_same_for_all_rows_at_once(found: Found) -> None:
    """It packs them into the same steps; a step's buffer is used again while the call goes on."""
    assert len(found[0]["tokens"]) > 2
    assert found[0]["differing at once"] == []


def test_steps_are_full(found: Found) -> None:
    *full, _last = sorted(found[0]["tokens"], reverse=True)
    assert all(tokens > 0.98 * 8192 for tokens in full)
    assert len(full) >= 2


def test_no_fewer_steps_could_hold_the_rows() -> None:
    from spec_compat.capture.prefill import pack  # imports vLLM

    draw = random.Random(0)
    lengths = [draw.randint(1, 4096) for _ in range(400)]
    steps = pack(lengths, 8192, 256)
    assert sorted(row for step in steps for row in step) == list(range(400))
    assert all(sum(lengths[row] for row in step) <= 8192 for step in steps)
    assert len(steps) == math.ceil(sum(lengths) / 8192)
    assert max(map(len, pack([1] * 1000, 8192, 256))) == 256
    assert pack([9000, 5], 8192, 256) == [[0], [1]]


def test_nobody_asking_the_sink_has_eight_buffers_of_small_states(found: Found) -> None:
    assert found[0]["buffers"] == [8]


def test_the_digests_are_those_of_the_files(found: Found) -> None:
    digests, root = found[0]["digests"], found[1]
    assert len(digests) == len(ROWS)
    for name, digest in digests.items():
        assert hashlib.sha256((root / "rows" / name).read_bytes()).hexdigest() == digest


@pytest.mark.parametrize(("kind", "tolerance"), [("shards", 0.0), ("zstd", 0.0), ("fp8", 0.04)])
def test_shards_hold_the_same_rows(kind: str, tolerance: float, found: Found) -> None:
    directory, shards = found[1] / kind, found[0][kind]
    holders = {number: name for name, numbers in shards.items() for number in numbers}
    assert sorted(holders) == list(range(len(ROWS)))
    assert all(name == f"shard_{numbers[0]}.safetensors" for name, numbers in shards.items())
    for number in range(len(ROWS)):
        row = storage.load(directory / holders[number], number).decoded()
        plain = storage.load(found[1] / "rows" / f"data_{number}.pt", number)
        assert row.input_ids.tolist() == plain.input_ids.tolist()
        assert row.loss_mask.tolist() == plain.loss_mask.tolist()
        for ours, theirs in zip(row.hidden_states, plain.hidden_states, strict=True):
            error = float((ours.float() - theirs.float()).norm() / theirs.float().norm())
            assert error <= tolerance


def test_the_next_steps_are_sent_while_one_computes(found: Found) -> None:
    assert max(found[0]["ahead"]) >= 1
    assert len(found[0]["ahead"]) == len(found[0]["tokens"])


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("not_finite", r"NaN or infinity in its states"),
        ("last_of_another", r"its last state gives token \d+, vLLM sampled \d+; .* last place"),
    ],
)
def test_a_row_that_fails_its_proof_gets_no_file_and_those_beside_it_do(
    fault: str, said: str, found: Found
) -> None:
    last, refused = found[0][fault]["last of step"], found[0][fault]["refused"]
    assert len(last) == 2
    assert sorted(map(int, refused)) == sorted(last)
    assert all(re.fullmatch(said, reason) for reason in refused.values()), refused
    assert found[0][fault]["written"] == sorted(set(range(20)) - set(last))
    names = {file.name for file in (found[1] / fault).iterdir()}
    assert names == {f"data_{row}.pt" for row in found[0][fault]["written"]}


def test_a_full_disk_is_told_and_leaves_no_half_file(found: Found) -> None:
    number, text = found[0]["failure"]
    assert (number, "No space left" in text) == (28, True)
    names = {file.name for file in (found[1] / "full").iterdir()}
    assert "data_7.pt" not in names
    assert not [name for name in names if name.startswith(".")]


def test_a_slow_disk_makes_the_steps_wait(found: Found) -> None:
    """60 rows, 15 steps of 4, two buffers: no more than two steps are not on the disk."""
    assert found[0]["slow"]["buffers"] == [2]
    assert len(found[0]["slow"]["behind"]) == 15
    assert max(found[0]["slow"]["behind"]) <= 2 * 4
    assert found[0]["slow"]["seconds"] > 60 / 8 * SLEEP


def test_memory_is_flat_from_1000_to_10000_rows(found: Found) -> None:
    """The states of the 9,000 rows more are 187 MB. What is held grows by some 20 MB once, and by
    nothing when as many rows come again; the allocator keeps up to 100 MB for later."""
    (before, blocks), (after, more) = (found[0][f"held after {n}"] for n in (1000, 10000))
    assert after - before < 48 << 20
    assert more - blocks < 9_000
    peaks = (found[0][f"peak after {n}"] for n in (1000, 10000))
    grown = [later - earlier for earlier, later in zip(*peaks, strict=True)]
    assert max(grown) < 150 << 20, grown
