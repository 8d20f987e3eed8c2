"""Killed, out of space, altered: a run ends as one that nothing happened to.

FAULT_POINTS is the number of points at which runs are killed, with all of the other cases too;
`make faults` sets it to 100. Without it there are a few of each.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.harness import Lab, differing
from tests.faults.signals import (
    Run,
    begun,
    ctrl_c,
    ctrl_c_twice,
    has_ranks,
    has_trained,
    has_worker,
    kill_rank,
    kill_runner,
    kill_stage,
    kill_worker,
    sighup,
    sigint,
    sigterm,
)

pytestmark = [pytest.mark.live, pytest.mark.slow]

POINTS = int(os.environ.get("FAULT_POINTS", "0"))
SHORT = {
    "harness": ("--points", "10", "--extract", "1"),
    "damage": ("flips,pickled,vanishing,changes",),
}
LONG = {"harness": ("--points", str(POINTS)), "damage": ()}
# Where, when, how; and whether in the short form too.
STRUCK: tuple[tuple[str, Callable[[Run], bool], Callable[..., str], bool], ...] = (
    ("prepare", begun, ctrl_c, True),
    ("prepare", begun, ctrl_c_twice, False),
    ("prepare", begun, kill_stage, False),
    ("extract", begun, sigint, False),
    ("extract", begun, kill_runner, False),
    ("extract", has_worker, ctrl_c_twice, False),
    ("extract", has_worker, kill_worker, True),
    ("extract", has_worker, kill_stage, False),
    ("extract", has_worker, sigterm, False),
    ("extract", has_worker, sighup, False),
    ("map", begun, sigterm, False),
    ("train", begun, kill_runner, True),
    ("train", has_trained, ctrl_c, True),
    ("train", has_trained, ctrl_c_twice, False),
    ("train", has_trained, kill_stage, False),
    ("train", has_trained, sigterm, True),
    ("export", begun, sigint, False),
)


def cases(module: str, lab: Path) -> list[dict[str, Any]]:
    """The lines that a harness printed, one for each case."""
    words = (LONG if POINTS else SHORT)[module]
    done = subprocess.run(
        [sys.executable, "-m", f"tests.faults.{module}", str(lab), *words],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=1200 + 120 * POINTS,
        check=False,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, done.stderr[-3000:]
    if done.returncode and all(case["ok"] for case in lines):
        raise AssertionError(done.stderr[-3000:])
    return lines


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults") / "lab"


@pytest.fixture(scope="module")
def points(lab: Path) -> list[dict[str, Any]]:
    return cases("harness", lab)


def test_killed_anywhere_a_run_ends_with_the_same_files(points: list[dict[str, Any]]) -> None:
    assert len({point["stage"] for point in points}) == 5
    assert [json.dumps(point) for point in points if not point["ok"]] == []


def test_disks_that_fail_and_bytes_that_flip_are_found(
    lab: Path, points: list[dict[str, Any]]
) -> None:
    found = cases("damage", lab)
    assert len(found) > 20
    assert not [case for case in found if not case["ok"]]


@pytest.mark.parametrize(
    ("stage", "when", "strike"),
    [case[:3] for case in STRUCK if POINTS or case[3]],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_struck_it_ends_soon_says_why_and_leaves_nothing(
    stage: str,
    when: Callable[[Run], bool],
    strike: Callable[..., str],
    lab: Path,
    points: list[dict[str, Any]],
) -> None:
    finished = Lab(lab)
    run = Run(finished, finished.without(stage, lab / "struck"))
    process = run.begin_until(stage, when)
    shared = run.shared()
    assert shared or when is not has_worker
    assert not strike(process, run)
    assert not run.processes()
    assert not [file for file in shared if file.exists()]
    if strike is sigterm:
        _, said = (process := run.begin()).communicate(timeout=300)
        assert process.returncode == 0, said
        assert not differing(finished, run.output)
    shutil.rmtree(run.output)


# Two ranks under torchrun are slow to begin; that what is killed is named with its log, the short
# form shows on a worker.
@pytest.mark.skipif(not POINTS, reason="a part of the long form: make faults")
def test_a_rank_that_is_killed_is_named(lab: Path, points: list[dict[str, Any]]) -> None:
    run = Run(Lab(lab), Lab(lab).without("train", lab / "struck"))
    process = run.begin_until("train", has_ranks, "--train-gpus", "2")
    assert not kill_rank(process, run)
    assert not run.processes()
