"""One run at a time in a directory, and what a killed one leaves there is waited for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spec_compat.errors import UserError
from spec_compat.pipeline.run import lock
from spec_compat.pipeline.run.lock import locked
from tests.unit.pipeline_inputs import Notes

# A runner that holds the lock, with a stage that inherits it and outlives its runner a while.
RUNNER = """
import subprocess, sys, time
from pathlib import Path
from spec_compat.pipeline.run.lock import locked
from tests.unit.pipeline_inputs import Notes

with locked(Path(sys.argv[1]), Notes()) as lock:
    stage = subprocess.Popen([sys.executable, "-c", sys.argv[2], sys.argv[1]], pass_fds=(lock,))
    print(stage.pid, flush=True)
    time.sleep(60)
"""

ELSEWHERE = {"host": "elsewhere", "pid": 2**22 + 1, "started": 1.0}  # no process here


def started(root: Path, stage: str) -> tuple[subprocess.Popen[str], int]:
    words = [sys.executable, "-c", RUNNER, str(root), stage]
    runner = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert runner.stdout is not None
    return runner, int(runner.stdout.readline())


def test_one_run_at_a_time(tmp_path: Path) -> None:
    with (
        locked(tmp_path / "run", Notes()),
        pytest.raises(UserError, match="another process works on this run"),
        locked(tmp_path / "run", Notes()),
    ):
        pass
    with locked(tmp_path / "run", Notes()):
        pass


def test_what_a_killed_run_left_is_waited_for(tmp_path: Path) -> None:
    runner, _ = started(tmp_path / "run", "import time; time.sleep(1.5)")
    runner.kill()
    os.waitid(os.P_PID, runner.pid, os.WEXITED | os.WNOWAIT)  # nobody has taken it away yet
    said, begun = Notes(), time.monotonic()
    with locked(tmp_path / "run", said):
        assert time.monotonic() - begun > 0.5
    runner.wait()
    assert said.notes == ["waiting for the processes of a run that was killed in this directory"]


def test_a_run_that_lives_is_not_waited_for(tmp_path: Path) -> None:
    runner, stage = started(tmp_path / "run", "import time; time.sleep(60)")
    try:
        with pytest.raises(UserError, match="another process"), locked(tmp_path / "run", Notes()):
            pass
    finally:
        runner.kill()
        os.kill(stage, signal.SIGKILL)
        runner.wait()


def test_what_does_not_end_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "run"
    runner, stage = started(root, "import time; time.sleep(60)")
    runner.kill()
    runner.wait()
    monkeypatch.setattr(lock, "WAIT_SECONDS", 0.3)
    try:
        with (
            pytest.raises(UserError, match=rf"have not ended .*\(process {stage}\)"),
            locked(root, Notes()),
        ):
            pass
    finally:
        os.kill(stage, signal.SIGKILL)


@pytest.mark.parametrize("content", ["", "{", "[]", json.dumps(ELSEWHERE)])
def test_a_holder_that_cannot_be_told_is_not_taken_for_dead(content: str, tmp_path: Path) -> None:
    with locked(tmp_path, Notes()):
        (tmp_path / ".lock").write_text(content)
        with pytest.raises(UserError, match="another process"), locked(tmp_path, Notes()):
            pass


def test_a_number_that_another_process_has_now_is_no_living_run(tmp_path: Path) -> None:
    with (tmp_path / ".lock").open("w") as stream:
        lock.fcntl.flock(stream, lock.fcntl.LOCK_EX)
        holder = {"host": lock.socket.gethostname(), "pid": os.getpid(), "started": 1.0}
        stream.write(json.dumps(holder))
        stream.flush()
        words = [sys.executable, "-c", "import time; time.sleep(1)"]
        release = subprocess.Popen(words, pass_fds=(stream.fileno(),))
    with locked(tmp_path, Notes()):
        assert release.wait() == 0
