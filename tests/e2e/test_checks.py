"""verify and check-head on a finished run, and faults planted in it: each is found, by name."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spec_compat.errors import UserError
from tests.e2e.conftest import ROWS, Command, command, environment

pytestmark = [pytest.mark.live, pytest.mark.slow]

Finished = tuple[Path, str]
Row = dict[str, Any]


@pytest.fixture
def run(finished: Finished, tmp_path: Path) -> Path:
    """A copy of the finished run, to be spoiled."""
    return Path(shutil.copytree(finished[0], tmp_path / "run"))


def train_counts(run: Path) -> dict[str, Any]:
    stages = json.loads((run / "manifest.json").read_text())["stages"]
    counts: dict[str, Any] = stages["train"]["result"]
    return counts


def test_the_expected_length_is_that_of_the_held_out_rows(finished: Finished) -> None:
    run, printed = finished
    counts = train_counts(run)
    assert len(counts["acceptance"]) == 3
    assert counts["acceptance"] == sorted(counts["acceptance"], reverse=True)
    assert counts["following_acceptance"][0] == counts["acceptance"][0]
    assert all(0 <= share <= 1 for share in counts["following_acceptance"])
    assert counts["expected_acceptance_length"] == pytest.approx(1 + sum(counts["acceptance"]))
    assert f"expected acceptance length: {counts['expected_acceptance_length']:.2f}" in printed
    # One batch holds what this run held out, so speculators' average is over the same positions
    # and the first of each turn; it counts among the tokens that can be drafted.
    rows = [name.split("/") for name in counts["held_out"]]
    files = [run / "gen" / dataset / f"data_{number}.pt" for dataset, number in rows]
    masks = [torch.load(file, weights_only=True)["loss_mask"] for file in files]
    trained = sum(int(mask[2:].sum()) for mask in masks)
    drafted = sum(int((mask[1:-1] & mask[2:]).sum()) for mask in masks)
    assert 0 < drafted < trained
    assert counts["acceptance"][0] * drafted <= counts["validation"]["full_acc_0"] * trained + 1e-3


def test_a_sound_run_verifies(cli: Command, finished: Finished) -> None:
    done = cli("verify", str(finished[0]), "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 0, found["problems"]
    assert (found["rows"], found["recomputed"], found["problems"]) == (ROWS, 4, [])
    assert list(found["errors"]) == ["2", "4", "5", "7"]
    assert all(0 < median < 0.02 for median, _worst in found["errors"].values())


def shift(row: Row) -> None:
    row["hidden_states"] = [state.roll(1, 0) for state in row["hidden_states"]]


def swap_layers(row: Row) -> None:
    first, second, *others = row["hidden_states"]
    row["hidden_states"] = [second, first, *others]


def norm_twice(row: Row) -> None:
    last = row["hidden_states"][-1].float()
    row["hidden_states"][-1] = (last * 1.1).bfloat16().roll(1, 1)


def shift_mask(row: Row) -> None:
    row["loss_mask"] = row["loss_mask"].roll(1)


def cut(row: Row) -> None:
    row["hidden_states"] = [state[:-1] for state in row["hidden_states"]]


def break_one(row: Row) -> None:
    row["hidden_states"][1][3, 5] = float("nan")


def widen(row: Row) -> None:
    row["hidden_states"] = [state.float() for state in row["hidden_states"]]


def drop_layer(row: Row) -> None:
    del row["hidden_states"][0]


def drop_mask(row: Row) -> None:
    del row["loss_mask"]


PLANTED: tuple[tuple[Callable[[Row], None], str], ...] = (
    (shift_mask, "its loss mask is not the one that was prepared"),
    (cut, "but states of shape"),
    (break_one, "the states of captured layer 1 are not finite"),
    (widen, "states are torch.float32, the verifier is torch.bfloat16"),
    (drop_layer, "states of 3 layers, not 4"),
    (drop_mask, "it has no loss_mask"),
    (shift, "the states of layer 2 are not the verifier's"),
    (swap_layers, "the states of layer 4 are not the verifier's"),
    (norm_twice, "the states of layer 7 are not the verifier's"),
)


def test_every_row_with_a_fault_is_named_and_no_other(run: Path) -> None:
    from spec_compat.pipeline.rows.index import Index
    from spec_compat.pipeline.system import atomic
    from spec_compat.pipeline.verify import verify

    rows = run / "gen" / "talks"
    for index, (plant, _said) in enumerate(PLANTED, start=1):
        row = torch.load(rows / f"data_{index}.pt", weights_only=True)
        plant(row)
        file = rows / f"data_{index}.pt"
        torch.save(row, file)
        # With its checksum, which would tell all of them.
        Index(rows).add(file.name, atomic.sha256(file), {index: 0})
    problems = verify(run, samples=ROWS).problems
    for index, (_plant, said) in enumerate(PLANTED, start=1):
        assert any(p.startswith(f"gen/talks/data_{index}.pt: ") and said in p for p in problems), (
            said
        )
    named = {problem.split(":")[0] for problem in problems}
    assert named == {f"gen/talks/data_{index}.pt" for index in range(1, len(PLANTED) + 1)}


def test_a_flipped_bit_and_a_missing_row_are_found_without_the_model(
    cli: Command, run: Path
) -> None:
    rows = run / "gen" / "talks"
    content = bytearray((rows / "data_3.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (rows / "data_3.pt").write_bytes(content)
    (rows / "data_5.pt").unlink()
    done = cli("verify", str(run), "--samples", "0")
    assert done.returncode == 4
    assert [line for line in done.stdout.splitlines() if line.startswith("problem: ")] == [
        "problem: gen/talks/data_3.pt: its checksum is not the one recorded",
        "problem: gen/talks/data_5.pt: the file is missing",
    ]


def test_each_shard_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of a step, and so of a shard, are from all over 4,096 rows."""
    from spec_compat.capture.orders import EncodedRow
    from spec_compat.pipeline import verify
    from spec_compat.pipeline.rows import storage
    from spec_compat.pipeline.rows.index import Index
    from spec_compat.pipeline.system import atomic

    index, kind = Index(tmp_path), storage.Shards()
    for rows in ([0, 2, 4], [1, 3]):
        file = tmp_path / f"shard_{rows[0]}.safetensors"
        content = {row: EncodedRow([7], [1], [torch.ones(1, 8)] * 4) for row in rows}
        index.add(file.name, kind.write(file, content).sha256, dict.fromkeys(rows, 1))
    read, sha256 = list[Path](), atomic.sha256
    monkeypatch.setattr(atomic, "sha256", lambda file: (read.append(file), sha256(file))[1])
    for row in range(5):
        assert verify._load(index, row).input_ids.tolist() == [7]
    assert sorted(file.name for file in read) == sorted(index.files)


def test_a_verifier_that_does_not_fit_is_refused_in_one_line(
    finished: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    from spec_compat.pipeline import verify

    monkeypatch.setattr(verify, "HEADROOM", 1e9)
    with pytest.raises(UserError, match=r"to recompute rows needs .* --samples 0 checks without"):
        verify.verify(finished[0])


def test_what_is_no_run_is_an_error_of_one_line(
    cli: Command, tiny_llama: Path, tmp_path: Path
) -> None:
    done = cli("verify", str(tiny_llama))
    assert done.returncode == 2
    said = f"error: {tiny_llama}: not the directory of a run: it has no manifest.json\n"
    assert done.stderr == said
    for directory in (tmp_path, tmp_path / "nowhere"):
        for name in ("verify", "check-head"):
            done = cli(name, str(directory))
            assert done.returncode == 2
            assert len(done.stderr.splitlines()) == 1


def test_the_exported_head_is_sound_and_a_spoiled_one_is_not(cli: Command, run: Path) -> None:
    sound = cli("check-head", str(run / "head"))
    assert sound.returncode == 0, sound.stdout
    assert "0.22.1 is the first that serves EAGLE-3 on a CPU" in sound.stdout
    asked = json.loads(cli("check-head", str(run / "head"), "--json").stdout)
    assert asked["served_by"] == "0.11.0 is the first that serves LlamaForCausalLM with EAGLE-3"
    config = json.loads((run / "head" / "config.json").read_text())
    config["transformer_layer_config"]["rope_theta"] = 10000.0
    config["eagle_aux_hidden_state_layer_ids"] = [3, 5, 9]
    (run / "head" / "config.json").write_text(json.dumps(config))
    spoiled = cli("check-head", str(run / "head"), "--json")
    assert spoiled.returncode == 4
    assert len(json.loads(spoiled.stdout)["problems"]) == 2


def trained_again(run: Path, **extra: str) -> subprocess.CompletedProcess[str]:
    """`train` with another learning rate, which throws the earlier epochs away."""
    return subprocess.run(
        command("train", "--output", str(run), "--lr", "0.002"),
        env={**environment(), **extra},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_training_without_the_final_norm_is_refused(run: Path) -> None:
    done = trained_again(run, SPEC_COMPAT_DISABLE="train/verifier-norm")
    assert done.returncode == 2
    assert "train/verifier-norm" in done.stderr
    assert not (run / "checkpoints").exists()


def test_a_shuffled_d2t_is_refused_before_training(run: Path) -> None:
    from spec_compat.pipeline.run.layout import Layout
    from spec_compat.pipeline.run.manifest import find
    from spec_compat.pipeline.stages import STAGES
    from spec_compat.pipeline.system import atomic

    file = run / "vocab_mapping" / "d2t.npy"
    np.save(file, np.random.default_rng(0).permutation(np.load(file)))
    done = trained_again(run)
    assert done.returncode == 2
    assert "vocab_mapping/d2t.npy has been altered" in done.stderr
    # As if the map stage had written it.
    made = find(run, STAGES)
    assert made is not None
    mapped = made.stages["map"].result
    assert mapped is not None
    mapped.outputs["vocab_mapping/d2t.npy"] = atomic.sha256(file)
    made.save(Layout(run))
    done = trained_again(run)
    assert done.returncode == 2
    line = done.stderr.splitlines()[-1]
    assert "d2t and t2d disagree" in line
    assert "--from map" in line
    assert not any(run.glob("checkpoints/*/model.safetensors"))


def test_targets_that_are_not_the_verifiers_are_refused(
    finished: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    from spec_compat.pipeline import entry
    from spec_compat.pipeline.head import targets
    from spec_compat.pipeline.rows.store import stored
    from spec_compat.pipeline.run.events import Events
    from spec_compat.pipeline.stages import training

    monkeypatch.setattr(os, "environ", environment())
    job = entry.job(finished[0], Events())
    rows = list(stored(finished[0] / "gen" / "talks"))[:4]
    states, head = training.last_states(rows), training.draft_head(job)
    verifier = targets.GreedyVerifier(job.verifier)
    targets.check(head, verifier, states)

    right = head.verifier_lm_head.weight.data
    head.verifier_lm_head.weight.data = right.roll(1, 0)
    with pytest.raises(UserError, match="the trainer's targets are not the verifier's"):
        targets.check(head, verifier, states)
    head.verifier_lm_head.weight.data = right
    head.verifier_lm_head._forward_pre_hooks.clear()
    head.verifier_norm = torch.nn.Identity()  # where 0.4 has it
    with pytest.raises(UserError, match="the trainer's targets are not the verifier's"):
        targets.check(head, verifier, states)
