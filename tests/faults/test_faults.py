"""Killed, out of space, altered: a run ends as one that nothing happened to.

FAULT_POINTS is the number of points at which runs are killed; `make faults` sets it to 100.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.live, pytest.mark.slow]

POINTS = int(os.environ.get("FAULT_POINTS", "10"))


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults") / "lab"


def cases(module: str, lab: Path, *arguments: str) -> list[dict[str, Any]]:
    """The lines that a harness printed, one for each case."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.faults.{module}", str(lab), *arguments],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60 + 120 * POINTS,
        check=False,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, done.stderr[-3000:]
    if done.returncode and all(case["ok"] for case in lines):
        raise AssertionError(done.stderr[-3000:])
    return lines


def test_killed_anywhere_a_run_ends_with_the_same_files(lab: Path) -> None:
    found = cases("harness", lab, "--points", str(POINTS))
    assert len({point["stage"] for point in found}) == 5
    assert not [point for point in found if not point["ok"]]


def test_disks_that_fail_and_bytes_that_flip_are_found(lab: Path) -> None:
    found = cases("damage", lab)
    assert len(found) > 20
    assert not [case for case in found if not case["ok"]]
