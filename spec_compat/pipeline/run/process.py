"""One stage in a process group of its own: how it is started, watched and ended."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from spec_compat.errors import SpecCompatError, UserError
from spec_compat.pipeline.run import manifest as manifests
from spec_compat.pipeline.run.config import ResolvedConfig
from spec_compat.pipeline.run.display import Display
from spec_compat.pipeline.run.events import Event, Failed, Finished, channel
from spec_compat.pipeline.run.layout import Layout
from spec_compat.pipeline.run.stage import R, Stage
from spec_compat.pipeline.system import disk, processes

# Set for every stage unless the user has set them.
ENVIRONMENT = {
    # vLLM's workers must not inherit the driver's CUDA context and threads.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # A log is no terminal: its progress bars are drawn anew every so many seconds.
    "TQDM_MININTERVAL": "5",
    # A file in the current directory must not stand in for a module of the same name.
    "PYTHONSAFEPATH": "1",
}
# Set whatever the user has: no stage unpickles, in code that is not ours either.
FORCED, CONTRARY = {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1"}, "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
# multiprocessing adds 32 bytes to it for sockets, whose names have 107 at most.
LONGEST_TMPDIR, SHORT_TMPDIR = 75, "/tmp"  # noqa: S108
# Where the log ends with the cause: what vLLM logs of a worker whose error it keeps to itself, and
# torchrun of a rank that could not say anything.
LOG_END = 1 << 15
TOLD = re.compile(r" ERROR [^\]\n]*\] ((?:\w+\.)*\w*(?:Error|Exception): .*)")
RANK_KILLED = re.compile(r"Signal (\d+) \(SIG\w+\) received by PID")
# For a stage to end by itself, and for what its processes share to be given back.
GRACE_SECONDS, TRACKER_SECONDS = 10.0, 3.0
NOTE_SECONDS = 10.0


class StageFailed(SpecCompatError):  # noqa: N818
    """A stage crashed; the message is one line with the cause and the log."""


def run(stage: Stage[R], config: ResolvedConfig, layout: Layout, display: Display, lock: int) -> R:
    """Run a stage's process to its end and return its result.

    `lock` is the descriptor that no other run may take before the last process of this one is gone.
    Raises what `failure` returns.
    """
    reports = layout.patch_reports(stage.name)
    shutil.rmtree(reports, ignore_errors=True)
    reports.mkdir(parents=True)
    results: list[R] = []
    failures: list[Failed] = []

    def receive(events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, Finished):
                results.append(stage.result.model_validate(event.result))
            elif isinstance(event, Failed):
                failures.append(event)
            else:
                display.event(event)

    with channel() as events, layout.log(stage.name).open("ab") as log:
        log.write(f"---- {manifests.now()} {stage}\n".encode())
        log.flush()
        # vLLM leaves its sockets where it had them.
        own = {"VLLM_RPC_BASE_PATH": str(events.path.parent), **os.environ}
        process = subprocess.Popen(
            command(stage, config, layout.root, events.path),
            stdin=subprocess.PIPE,  # its end tells the stage that the runner is gone
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment(own, reports, config.tensor_parallel_size),
            start_new_session=True,
            pass_fds=(lock,),
        )
        note_at = time.monotonic() if stage.shares_memory else float("inf")
        try:
            with _ended(process):
                while process.poll() is None:
                    receive(events.receive(0.2))
                    if time.monotonic() > note_at:
                        processes.note(layout.shared, processes.groups(process.pid))
                        note_at = time.monotonic() + NOTE_SECONDS
                receive(events.receive(0))
        finally:
            processes.give_back(layout.shared)
    if not _is_there(lock, layout):  # libraries would make it anew, in silence
        raise UserError(f"--output {layout.root}: the directory is gone")
    if process.returncode == 0 and results:
        return results[0]
    raise failure(stage.name, failures, process.returncode, layout.log(stage.name))


def command(stage: Stage[Any], config: ResolvedConfig, root: Path, events: Path) -> list[str]:
    """What runs a stage; on several GPUs, by torchrun, a process for each."""
    words = ["-m", "spec_compat.pipeline", stage.name]
    words += ["--directory", str(root), "--events", str(events)]
    if (ranks := stage.ranks(config)) > 1:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        words = [*torchrun, *words]
    return [sys.executable, *words]


def environment(own: Mapping[str, str], reports: Path, workers: int = 1) -> dict[str, str]:
    """The variables of a stage: those that are set, and what the pipeline needs."""
    found = {**ENVIRONMENT, **own, **FORCED, "SPEC_COMPAT_REPORT_DIR": str(reports)}
    found.pop(CONTRARY, None)
    if workers > 1:  # on a CPU vLLM refuses more workers than NUMA nodes unless this is set
        found.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    if len(os.fsencode(found.get("TMPDIR", ""))) > LONGEST_TMPDIR:
        found["TMPDIR"] = SHORT_TMPDIR
    plugins = found.get("VLLM_PLUGINS")
    if plugins is not None and "spec_compat" not in plugins.split(","):
        found["VLLM_PLUGINS"] = ",".join(filter(None, [plugins, "spec_compat"]))
    return found


def failure(stage: str, failures: list[Failed], returncode: int, log: Path) -> SpecCompatError:
    """The error that a stage ended with; of several ranks, the first to fail is the cause."""
    told = failures[0] if failures else None
    if told is not None and told.kind == "full" and told.place is not None:
        return disk.Full(told.text, told.place)
    if told is not None and told.kind == "user":
        return UserError(told.text)
    end = _end(log)
    if told is not None and processes.TOLD_OF in told.text and (logged := TOLD.findall(end)):
        cause = logged[-1]
    elif told is not None:
        cause = told.text
    elif returncode < 0:
        cause = processes.killed(-returncode)
    elif ranks := RANK_KILLED.findall(end):
        cause = f"a rank was {processes.killed(int(ranks[-1]))}"
    else:
        cause = f"ended with exit code {returncode}"
    return StageFailed(f"{stage}: {cause}; the log is {log}")


def _is_there(lock: int, layout: Layout) -> bool:
    """Whether the run directory is still the one that was locked."""
    try:
        return os.path.samestat(os.fstat(lock), (layout.root / ".lock").stat())
    except OSError:
        return False


def _end(log: Path) -> str:
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - LOG_END))
        return stream.read().decode("utf-8", errors="replace")


@contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Leave no process of the group behind, whatever happens; a second Ctrl-C does not wait."""
    try:
        yield
    finally:
        alone = process.poll() is not None
        groups = {process.pid} if alone else processes.groups(process.pid)
        held = processes.shared_memory(groups)
        with processes.hastened(groups):
            if not alone:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE_SECONDS)
            # Semaphores and shared memory are given back by a process that outlives the others.
            _wait_for(groups, TRACKER_SECONDS)
            processes.end(groups, held)
            process.wait()
            _wait_for(groups, TRACKER_SECONDS)


def _wait_for(groups: set[int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(processes.members(groups)) and time.monotonic() < deadline:
        time.sleep(0.02)
