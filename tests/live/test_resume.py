"""speculators' trainer, killed and resumed, is the trainer that was never killed."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytestmark = [pytest.mark.live, pytest.mark.slow]

SCRIPT = Path(__file__).with_name("trainings.py")
WEIGHTS, OPTIMIZER = "model.safetensors", "optimizer_state_dict.pt"
SCHEDULER = "scheduler_state_dict.pt"
EPOCHS, STEPS = 4, 3

Job = dict[str, Any]


class Trainings:
    """Runs of one release, all in one process that forks them; `codes` has those of their ranks."""

    def __init__(self, directory: Path, verifier: Path, site: Path | None, jobs: list[Job]) -> None:
        self.directory = directory
        done = subprocess.run(
            [sys.executable, SCRIPT, verifier, json.dumps(jobs)],
            env={**os.environ, "PYTHONPATH": str(site or "")},
            cwd=directory,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        lines = [json.loads(codes) for codes in re.findall(r"^codes (.*)$", done.stdout, re.M)]
        self.codes: dict[str, list[list[int]]] = {}
        for job, codes in zip([job for job in jobs if "run" in job], lines, strict=True):
            self.codes.setdefault(job["run"], []).append(codes)

    def logged(self, run: str) -> list[dict[str, Any]]:
        lines = (self.directory / run / "metrics.jsonl").read_text().splitlines()
        return [record for record in map(json.loads, lines) if "train" in record]

    def resumed(self, run: str, first: int) -> list[dict[str, Any]]:
        """What was logged since the run was resumed at this epoch, which it had begun before."""
        records = self.logged(run)
        there = [number for number, record in enumerate(records) if record["epoch"] == first]
        return records[there[len(there) // 2] :]

    def said(self, run: str) -> str:
        return (self.directory / run / "rank_0.err").read_text()


def killed(run: str, killed_at: str, **more: Any) -> list[Job]:
    return [{"run": run, "killed_at": killed_at, **more}, {"run": run, **more}]


def curve(records: list[dict[str, Any]], epochs: range) -> list[tuple[int, float, float]]:
    """Step, learning rate and loss of every training step."""
    return [
        (record["step"], record["lr"], record["train"]["loss"])
        for record in records
        if record["epoch"] in epochs
    ]


RELEASES = ("0.3.0", "0.4.0.1")
ALWAYS = [
    {"run": "whole"},
    *killed("epoch2", "epoch2"),
    *killed(OPTIMIZER, OPTIMIZER),
    {"run": "ranks-whole", "ranks": 2},
    *killed("ranks-epoch2", "epoch2", ranks=2),
]
ALTERED = f"altered/checkpoints/1/{WEIGHTS}"
ONCE = [
    *killed(SCHEDULER, SCHEDULER),
    # What wraps a patch is undone with it.
    *killed("train/resume", "epoch2", off=["train/resume", "train/whole-checkpoints"]),
    *killed("train/optimizer-dtype", "epoch2", off=["train/optimizer-dtype"]),
    *killed("half", OPTIMIZER, off=["train/whole-checkpoints"]),
    {"run": "altered", "killed_at": "epoch2"},
    {"flip": ALTERED},
    {"run": "altered"},
]


@pytest.fixture(scope="module", params=RELEASES)
def trainings(
    request: pytest.FixtureRequest, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Trainings:
    directory = tmp_path_factory.mktemp("resume")
    site = None
    if request.param != "0.3.0":
        site = directory / "site"
        words = ["--no-deps", "--target", str(site), f"speculators=={request.param}"]
        uv = [sys.executable, "-m", "uv", "pip", "install", "--quiet"]
        subprocess.run([*uv, "--python", sys.executable, *words], check=True)
    return Trainings(directory, tiny_llama, site, ALWAYS if site else [*ALWAYS, *ONCE])


@pytest.fixture
def oldest(trainings: Trainings, request: pytest.FixtureRequest) -> Trainings:
    # ONCE is trained with one release: its runs cost minutes, and the patches are the same code.
    if request.node.callspec.params["trainings"] != "0.3.0":
        pytest.skip("ONCE is trained with speculators 0.3.0 alone")
    return trainings


def assert_ends_the_same(trainings: Trainings, run: str, whole: str, first: int) -> None:
    again = range(first, EPOCHS)
    assert curve(trainings.resumed(run, first), again) == curve(trainings.logged(whole), again)
    for epoch in range(EPOCHS):
        ours, theirs = (trainings.directory / d / "checkpoints" / str(epoch) for d in (run, whole))
        for name, tensor in load_file(theirs / WEIGHTS).items():
            assert torch.equal(load_file(ours / WEIGHTS)[name], tensor), name
        states = [torch.load(d / OPTIMIZER, weights_only=True)["state"] for d in (ours, theirs)]
        for name, state in states[1].items():
            for key, tensor in state.items():
                assert torch.equal(states[0][name][key], tensor), (name, key)
                assert tensor.dtype == torch.float32
    directories = (trainings.directory / run / "checkpoints").iterdir()
    assert {path.name for path in directories} == set("0123")


@pytest.mark.parametrize("killed_at", ["epoch2", OPTIMIZER])
def test_killed_and_resumed_it_ends_with_the_same_tensors(
    killed_at: str, trainings: Trainings
) -> None:
    assert trainings.codes[killed_at] == [[-9], [0]], trainings.said(killed_at)
    assert [r["step"] for r in trainings.logged("whole")] == list(range(EPOCHS * STEPS))
    first = 2 if killed_at == "epoch2" else 1
    assert_ends_the_same(trainings, killed_at, "whole", first)


def test_killed_between_optimizer_and_scheduler_too(oldest: Trainings) -> None:
    assert oldest.codes[SCHEDULER] == [[-9], [0]], oldest.said(SCHEDULER)
    assert_ends_the_same(oldest, SCHEDULER, "whole", 1)


def test_several_ranks_resume_as_one_does(trainings: Trainings) -> None:
    """Sharded, each rank with rows and noise of its own."""
    assert trainings.codes["ranks-whole"] == [[0, 0]], trainings.said("ranks-whole")
    struck, resumed = trainings.codes["ranks-epoch2"]
    assert struck[0] == -9
    assert resumed == [0, 0], trainings.said("ranks-epoch2")
    assert_ends_the_same(trainings, "ranks-epoch2", "ranks-whole", 2)


@pytest.mark.parametrize("off", ["train/resume", "train/optimizer-dtype"])
def test_without_the_patch_the_curve_is_another(off: str, oldest: Trainings) -> None:
    assert oldest.codes[off] == [[-9], [0]]
    whole = curve(oldest.logged("whole"), range(2, EPOCHS))
    resumed = oldest.resumed(off, 2)
    assert [record["train"]["loss"] for record in resumed] != [loss for *_, loss in whole]
    if off == "train/resume":
        assert [record["step"] for record in resumed] == list(range(6))
        assert resumed[0]["lr"] != whole[0][1]


def test_without_the_patch_half_a_checkpoint_is_resumed_from(oldest: Trainings) -> None:
    assert oldest.codes["half"] == [[-9], [1]]
    assert "PytorchStreamReader failed" in oldest.said("half")


def test_an_altered_checkpoint_is_not_resumed_from(oldest: Trainings) -> None:
    assert oldest.codes["altered"] == [[-9], [0]]
    again = range(1, EPOCHS)
    assert curve(oldest.resumed("altered", 1), again) == curve(oldest.logged("whole"), again)
