"""The real command, stopped and killed in every stage: at once, for good, and with nothing left."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from spec_compat.pipeline import processes
from tests import tiny_models
from tests.e2e.conftest import command, environment
from tests.faults.harness import OPTIONS, ROWS

pytestmark = [pytest.mark.live, pytest.mark.slow]

LONG = "FAULT_POINTS" in os.environ
# From the signal to the end of the command.
SECONDS, AT_ONCE = 13.0, 3.0


@dataclass
class Run:
    """One run, begun again after each signal from where it was stopped."""

    root: Path

    def begin(self) -> subprocess.Popen[str]:
        flags = {"model": self.root / "model", "data": self.root / "talks.jsonl"} | OPTIONS
        words = [str(word) for k, v in flags.items() for word in ("--" + k.replace("_", "-"), v)]
        return subprocess.Popen(
            command("run-pipeline", *words, "--output", str(self.output)),
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # its group is what a terminal sends Ctrl-C to
        )

    @property
    def output(self) -> Path:
        return self.root / "run"

    def processes(self) -> list[Path]:
        """Whatever a stage of the run began, in whatever group, by the environment it inherited."""
        marked = f"SPEC_COMPAT_REPORT_DIR={self.output}/".encode()
        return [p for p in Path("/proc").glob("[0-9]*") if marked in read(p / "environ")]

    def stage(self) -> Path:
        """The process that leads the stage."""
        return next(p for p in self.processes() if os.getpgid(int(p.name)) == int(p.name))

    def workers(self) -> list[Path]:
        """Those that compute or load for the stage."""
        leader = self.stage()
        others = [p for p in self.processes() if p != leader]
        return [p for p in others if b"resource_tracker" not in read(p / "cmdline")]


def read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    root = tmp_path_factory.mktemp("signals")
    tiny_models.make_tiny_llama(root / "model")
    tiny_models.write_conversations(root / "talks.jsonl", ROWS)
    run = Run(root)
    yield run
    assert not run.processes()


def ctrl_c(process: subprocess.Popen[str], run: Run) -> float:
    os.killpg(process.pid, signal.SIGINT)
    return SECONDS


def ctrl_c_twice(process: subprocess.Popen[str], run: Run) -> float:
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    return AT_ONCE


def sigint(process: subprocess.Popen[str], run: Run) -> float:
    process.send_signal(signal.SIGINT)
    return SECONDS


def sigterm(process: subprocess.Popen[str], run: Run) -> float:
    process.send_signal(signal.SIGTERM)
    return SECONDS


def kill_worker(process: subprocess.Popen[str], run: Run) -> float:
    os.kill(int(run.workers()[0].name), signal.SIGKILL)
    return SECONDS


def kill_stage(process: subprocess.Popen[str], run: Run) -> float:
    os.kill(int(run.stage().name), signal.SIGKILL)
    return SECONDS


def begun(run: Run) -> bool:
    return bool(run.processes())


def has_worker(run: Run) -> bool:
    """It has mapped what it shares with the stage."""
    return bool(run.processes()) and any(b"/psm_" in read(p / "maps") for p in run.workers())


def has_trained(run: Run) -> bool:
    return bool(read(run.output / "logs" / "metrics.jsonl"))


# In the order in which the stages are run: where, when, how; and whether in the short form too.
CASES: tuple[tuple[str, Callable[[Run], bool], Callable[..., float], bool], ...] = (
    ("prepare", begun, ctrl_c, True),
    ("prepare", begun, ctrl_c_twice, False),
    ("extract", begun, sigint, False),
    ("extract", has_worker, ctrl_c_twice, True),
    ("extract", has_worker, kill_worker, True),
    ("extract", has_worker, kill_stage, False),
    ("extract", has_worker, sigterm, False),
    ("map", begun, sigterm, False),
    ("train", begun, ctrl_c, False),
    ("train", has_trained, ctrl_c_twice, False),
    ("train", has_trained, kill_stage, False),
    ("train", has_trained, sigterm, True),
    ("export", begun, sigint, False),
)


@pytest.mark.parametrize(
    ("stage", "when", "how"),
    [case[:3] for case in CASES if LONG or case[3]],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_it_stops_and_leaves_nothing(
    stage: str, when: Callable[[Run], bool], how: Callable[..., float], run: Run
) -> None:
    process = run.begin()
    log = run.output / "logs" / f"{stage}.log"
    earlier = len(read(log))
    while len(read(log)) == earlier or not when(run):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    there = run.processes()
    shared = processes.shared_memory(int(run.stage().name))
    assert when is not has_worker or shared

    struck = time.monotonic()
    allowed = how(process, run)
    _, said = process.communicate(timeout=60)
    assert time.monotonic() - struck < allowed
    (line,) = said.splitlines()
    if how in (kill_worker, kill_stage):
        assert process.returncode == 1
        assert line.startswith(f"error: {stage}: ")
        assert "killed by SIGKILL, by hand or because memory ran out" in line
        assert line.endswith(f"; the log is {log}")
    else:
        assert process.returncode == 130
        assert line == "error: stopped; the same command goes on from here"
    assert not run.processes()
    assert not [process for process in there if b"spec_compat" in read(process / "cmdline")]
    assert not [file for file in shared if file.exists()]


def test_after_all_that_the_run_ends(run: Run) -> None:
    process = run.begin()
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert (run.output / "head" / "model.safetensors").is_file()
    assert not list(run.output.rglob("*.part"))
