"""A stage whose runner is killed ends, whatever it was about to do when that happened."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from spec_compat.pipeline.run.lock import locked
from tests import tiny_models
from tests.unit.pipeline_inputs import Notes, make_data

pytestmark = [pytest.mark.live, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
SECONDS = 20.0
# What a stage imports on its way from Popen to its first event, in this order.
POINTS = (
    "spec_compat",
    "spec_compat.pipeline",
    "spec_compat.pipeline.stages",
    "multiprocessing.connection",
    "spec_compat.pipeline.entry",
    "spec_compat.pipeline.stages.tokenization",
)
# In the stage alone: it stops before it imports the module, and says so.
DELAY = """
import os, sys, time

class Delay:
    def find_spec(self, name, path, target=None):
        if name == os.environ["DELAY_AT"]:
            sys.meta_path.remove(self)
            with open(os.environ["DELAYED"] + ".part", "w") as file:
                file.write(str(os.getpid()))
            os.rename(os.environ["DELAYED"] + ".part", os.environ["DELAYED"])
            time.sleep(1.5)

if "spec_compat.pipeline" in sys.orig_argv:
    sys.meta_path.insert(0, Delay())
"""


@pytest.mark.parametrize("point", POINTS)
def test_a_stage_ends_whose_runner_is_killed_before_its_first_event(
    point: str, tmp_path: Path
) -> None:
    tiny_models.make_tiny_llama(tmp_path / "model")
    data, run, delayed = make_data(tmp_path / "d.jsonl"), tmp_path / "run", tmp_path / "delayed"
    (tmp_path / "sitecustomize.py").write_text(DELAY)
    runner = subprocess.Popen(
        [sys.executable, "-m", "spec_compat.cli", "prepare", "--model", tmp_path / "model",
         "--data", data, "--output", run],
        env={**os.environ, "PYTHONPATH": str(tmp_path), "DELAY_AT": point, "DELAYED": str(delayed)},
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        cwd=ROOT,
    )  # fmt: skip
    while not delayed.exists():
        assert runner.poll() is None
        time.sleep(0.02)
    os.killpg(runner.pid, signal.SIGKILL)
    runner.wait()
    stage = int(delayed.read_text())
    deadline = time.monotonic() + SECONDS
    while psutil.pid_exists(stage) and psutil.Process(stage).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the stage outlives its runner"
        time.sleep(0.05)
    with locked(run, Notes()):  # and nothing else of the run is left
        pass
