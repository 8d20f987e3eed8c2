"""The real command on a run: begun, watched through /proc, and struck."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from spec_compat.pipeline.run import process
from spec_compat.pipeline.system import processes
from tests.e2e.conftest import command, environment
from tests.faults.harness import OPTIONS, Lab

# From the signal to the end of the command: it takes one or two, and several on a busy machine.
# At once is less than a stage is given to end by itself.
SECONDS, AT_ONCE = 20.0, 8.0
assert process.GRACE_SECONDS > AT_ONCE
KILLED = "killed by SIGKILL, by hand or because memory ran out; the log is "


@dataclass
class Run:
    """A run of the lab's, by the command that a user types."""

    lab: Lab
    output: Path
    groups: set[int] = field(default_factory=set)

    def begin(self, *more: str) -> subprocess.Popen[str]:
        flags = {"model": self.lab.model, "data": self.lab.data, "output": self.output} | OPTIONS
        words = [str(word) for k, v in flags.items() for word in ("--" + k.replace("_", "-"), v)]
        return subprocess.Popen(
            command("run-pipeline", *words, *more),
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # its group is what a terminal sends Ctrl-C to
            # A job that a shell has put into the background ignores it, and so would this one.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )

    def begin_until(
        self, stage: str, when: Callable[[Run], bool], *more: str
    ) -> subprocess.Popen[str]:
        process = self.begin(*more)
        log = self.output / "logs" / f"{stage}.log"
        earlier = len(read(log))
        while len(read(log)) == earlier or not when(self):
            assert process.poll() is None, process.communicate()
            time.sleep(0.1)
        return process

    def processes(self) -> list[Path]:
        """Whatever a stage of the run began: by the environment that it inherited, or the group.

        vLLM writes the titles of its workers over their environment.
        """
        marked = f"SPEC_COMPAT_REPORT_DIR={self.output}/".encode()
        every = [p for p in Path("/proc").glob("[0-9]*") if read(p / "maps")]
        self.groups |= {group(p) for p in every if marked in read(p / "environ")}
        self.groups.discard(-1)
        return [p for p in every if group(p) in self.groups]

    def stage(self) -> Path:
        """The process that leads the stage."""
        return next(p for p in self.processes() if group(p) == int(p.name))

    def workers(self) -> list[Path]:
        """Those that compute or load for the stage."""
        others = [p for p in self.processes() if group(p) != int(p.name)]
        return [p for p in others if b"resource_tracker" not in read(p / "cmdline")]

    def shared(self) -> set[Path]:
        return processes.shared_memory(processes.groups(int(self.stage().name)))


def group(process: Path) -> int:
    try:
        return os.getpgid(int(process.name))
    except ProcessLookupError:
        return -1


def read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""


def begun(run: Run) -> bool:
    return bool(run.processes())


def has_worker(run: Run) -> bool:
    """It has mapped what it shares with the stage."""
    return any(b"/psm_" in read(worker / "maps") for worker in run.workers())


def ranks(run: Run) -> list[Path]:
    """The processes that torchrun started; each leads a group."""
    there = (p for p in run.processes() if group(p) == int(p.name))
    return [p for p in there if b"torch.distributed.run" not in read(p / "cmdline")]


def has_ranks(run: Run) -> bool:
    return len(ranks(run)) == 2


def has_trained(run: Run) -> bool:
    return bool(read(run.output / "logs" / "metrics.jsonl"))


def ctrl_c(process: subprocess.Popen[str], run: Run) -> str:
    os.killpg(process.pid, signal.SIGINT)
    return stopped(process, SECONDS)


def ctrl_c_twice(process: subprocess.Popen[str], run: Run) -> str:
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    return stopped(process, AT_ONCE)


def sigint(process: subprocess.Popen[str], run: Run) -> str:
    process.send_signal(signal.SIGINT)
    return stopped(process, SECONDS)


def sigterm(process: subprocess.Popen[str], run: Run) -> str:
    process.send_signal(signal.SIGTERM)
    return stopped(process, SECONDS)


def sighup(process: subprocess.Popen[str], run: Run) -> str:
    """What a run hears when its terminal, or the connection to it, is gone."""
    process.send_signal(signal.SIGHUP)
    return stopped(process, SECONDS)


def stopped(process: subprocess.Popen[str], seconds: float) -> str:
    _, said = process.communicate(timeout=seconds)
    ok = (process.returncode, said) == (
        130,
        "error: stopped; the same command goes on from here\n",
    )
    return "" if ok else f"{process.returncode}: {said}"


def kill_worker(process: subprocess.Popen[str], run: Run) -> str:
    os.kill(int(run.workers()[0].name), signal.SIGKILL)
    return failed(process, "a worker process was ", run)


def kill_rank(process: subprocess.Popen[str], run: Run) -> str:
    os.kill(int(ranks(run)[0].name), signal.SIGKILL)
    return failed(process, "a rank was ", run)


def kill_stage(process: subprocess.Popen[str], run: Run) -> str:
    os.kill(int(run.stage().name), signal.SIGKILL)
    return failed(process, "", run)


def failed(process: subprocess.Popen[str], who: str, run: Run) -> str:
    """One line with the cause and the log, which exists."""
    _, said = process.communicate(timeout=SECONDS)
    (line,) = said.splitlines()
    log = Path(line.partition(KILLED)[2])
    expected = f"error: {log.stem}: {who}{KILLED}{log}"
    ok = process.returncode == 1 and line == expected and log.parent == run.output / "logs"
    return "" if ok and log.is_file() else f"{process.returncode}: {said}"


def kill_runner(process: subprocess.Popen[str], run: Run) -> str:
    """A second run is refused while the first is there; killed, it leaves no lock."""
    second = run.begin()
    _, said = second.communicate(timeout=120)
    expected = f"error: --output {run.output}: another process works on this run\n"
    process.kill()
    process.communicate()
    deadline = time.monotonic() + SECONDS
    while run.processes() and time.monotonic() < deadline:
        time.sleep(0.05)
    return "" if (second.returncode, said) == (2, expected) else f"{second.returncode}: {said}"
