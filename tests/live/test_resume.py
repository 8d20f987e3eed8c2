"""speculators' trainer, killed and resumed, is the trainer that was never killed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytestmark = [pytest.mark.live, pytest.mark.slow]

SCRIPT = Path(__file__).with_name("resume.py")
WEIGHTS, OPTIMIZER = "model.safetensors", "optimizer_state_dict.pt"


def train(
    verifier: Path, run: Path, killed_at: str = "", off: str = ""
) -> subprocess.CompletedProcess[str]:
    run.mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, str(SCRIPT), str(verifier), str(run), killed_at],
        env={**os.environ, "SPEC_COMPAT_DISABLE": off},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def logged(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def curve(run: Path, epochs: range) -> list[tuple[int, float, float]]:
    """Step, learning rate and loss of every training step."""
    return [
        (record["step"], record["lr"], record["train"]["loss"])
        for record in logged(run)
        if "train" in record and record["epoch"] in epochs
    ]


@pytest.fixture(scope="module")
def whole(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("resume") / "whole"
    done = train(tiny_llama, run)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [step for step, *_ in curve(run, range(4))] == list(range(12))
    return run


@pytest.mark.parametrize("killed_at", ["epoch2", OPTIMIZER, "scheduler_state_dict.pt"])
def test_killed_and_resumed_it_ends_with_the_same_tensors(
    killed_at: str, whole: Path, tiny_llama: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert train(tiny_llama, run, killed_at).returncode == -9
    before = len(logged(run))
    done = train(tiny_llama, run)
    assert done.returncode == 0, done.stderr[-3000:]
    again = range(2 if killed_at == "epoch2" else 1, 4)
    resumed = [r for r in logged(run)[before:] if "train" in r]
    assert [(r["step"], r["lr"], r["train"]["loss"]) for r in resumed] == curve(whole, again)
    for epoch in range(4):
        ours, theirs = (d / "checkpoints" / str(epoch) for d in (run, whole))
        for name, tensor in load_file(theirs / WEIGHTS).items():
            assert torch.equal(load_file(ours / WEIGHTS)[name], tensor), name
        states = [torch.load(d / OPTIMIZER, weights_only=True)["state"] for d in (ours, theirs)]
        for name, state in states[1].items():
            for key, tensor in state.items():
                assert torch.equal(states[0][name][key], tensor), (name, key)
                assert tensor.dtype == torch.float32
    assert {path.name for path in (run / "checkpoints").iterdir()} == set("0123")


@pytest.mark.parametrize("off", ["train/resume", "train/optimizer-dtype"])
def test_without_the_patch_the_curve_is_another(
    off: str, whole: Path, tiny_llama: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert train(tiny_llama, run, "epoch2", off).returncode == -9
    before = len(logged(run))
    assert train(tiny_llama, run, off=off).returncode == 0
    resumed = [r for r in logged(run)[before:] if "train" in r]
    steps = [r["step"] for r in resumed]
    assert [r["train"]["loss"] for r in resumed] != [loss for *_, loss in curve(whole, range(2, 4))]
    if off == "train/resume":
        assert steps == list(range(6))
        assert resumed[0]["lr"] != curve(whole, range(2, 4))[0][1]


def test_without_the_patch_half_a_checkpoint_is_resumed_from(
    tiny_llama: Path, tmp_path: Path
) -> None:
    off = "train/whole-checkpoints"
    assert train(tiny_llama, tmp_path, OPTIMIZER, off).returncode == -9
    done = train(tiny_llama, tmp_path, off=off)
    assert done.returncode == 1
    assert "PytorchStreamReader failed" in done.stderr


def test_an_altered_checkpoint_is_not_resumed_from(
    whole: Path, tiny_llama: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert train(tiny_llama, run, "epoch2").returncode == -9
    weights = run / "checkpoints" / "1" / WEIGHTS
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    before = len(logged(run))
    assert train(tiny_llama, run).returncode == 0
    resumed = [r for r in logged(run)[before:] if "train" in r]
    assert [r["train"]["loss"] for r in resumed] == [loss for *_, loss in curve(whole, range(1, 4))]
