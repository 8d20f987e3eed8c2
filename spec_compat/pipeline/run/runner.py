"""Runs the stages of a plan, each in a process group of its own, and keeps the manifest."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from spec_compat.errors import SpecCompatError, UserError
from spec_compat.pipeline.run import manifest as manifests
from spec_compat.pipeline.run.display import Display
from spec_compat.pipeline.run.events import Event, Events, channel
from spec_compat.pipeline.run.layout import STAGES, Layout, Stage
from spec_compat.pipeline.run.manifest import Manifest, StageRecord
from spec_compat.pipeline.run.plan import Plan
from spec_compat.pipeline.run.servers import ServingPause
from spec_compat.pipeline.run.stage import TOLD_OF
from spec_compat.pipeline.system import atomic, disk, gpus, processes
from spec_compat.pipeline.system.units import size
from spec_compat.report import Report

# Set for every stage unless the user has set them.
ENVIRONMENT = {
    # vLLM's workers must not inherit the driver's CUDA context and threads.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # A file in the current directory must not stand in for a module of the same name.
    "PYTHONSAFEPATH": "1",
}
# Set whatever the user has: no stage unpickles, in code that is not ours either.
FORCED, CONTRARY = {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1"}, "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
# Where the log ends with the cause: what vLLM logs of a worker whose error it keeps to itself, and
# torchrun of a rank that could not say anything.
LOG_END = 1 << 15
TOLD = re.compile(r" ERROR [^\]\n]*\] ((?:\w+\.)*\w*(?:Error|Exception): .*)")
RANK_KILLED = re.compile(r"Signal (\d+) \(SIG\w+\) received by PID")
# For a stage to end by itself, and for what its processes share to be given back.
GRACE_SECONDS, TRACKER_SECONDS = 10.0, 3.0
# vLLM shares hundreds of megabytes as long as it lives; the others what is gone in a moment.
NOTE_SECONDS = 10.0


class StageFailed(SpecCompatError):  # noqa: N818
    """A stage crashed; the message is one line with the cause and the log."""


def selected(first: Stage | None, last: Stage | None) -> tuple[Stage, ...]:
    """The stages from `first` to `last`; export always follows train. Raises UserError."""
    start = STAGES.index(first or "prepare")
    end = STAGES.index("export" if last in (None, "train") else last)
    if start > end:
        raise UserError(f"--from {first} comes after --to {last}")
    return STAGES[start : end + 1]


def run(
    plan: Plan, display: Display, first: Stage | None = None, last: Stage | None = None
) -> Manifest:
    """Run the stages that are not done yet and return the manifest.

    Raises UserError for what the user can mend, StageFailed for a crash, KeyboardInterrupt when
    stopped; in each case no process of the run is left and the run can be continued.
    """
    try:
        return _run(plan, display, first, last)
    except OSError as error:
        if fault := disk.as_user_error(error, plan.config.output):
            raise UserError(f"--output {fault}") from error
        raise


def _run(plan: Plan, display: Display, first: Stage | None, last: Stage | None) -> Manifest:
    layout = Layout(plan.config.output)
    stages = selected(first, last)
    _read_weights(plan, display)
    _earlier(plan, layout, stages, first)  # once before the lock, which makes the directory
    pause = ServingPause(plan.config, lambda text: display.event({"event": "note", "text": text}))
    with manifests.locked(layout) as lock, pause:
        if left := processes.give_back(layout.shared):
            Shown(display).note(f"gave back {size(left)} of memory that a killed run had left")
        earlier = _earlier(plan, layout, stages, first, locked=True)
        manifest = earlier or manifests.begin(plan)
        manifest.options = plan.config.model_dump(mode="json")
        manifest.sources, manifest.weights = plan.sources, plan.weights
        _save(manifest, plan, layout, display)
        for stage in stages:
            _run_stage(stage, plan, manifest, layout, display, pause, lock)
    return manifest


def _read_weights(plan: Plan, display: Display) -> None:
    shown = Shown(display)

    def progress(done: int, total: int) -> None:
        shown.progress(done, note=f"of {total} files")

    shown.doing("reading the verifier's weights, to tell when they change")
    plan.read_weights(progress)


def _earlier(
    plan: Plan,
    layout: Layout,
    stages: tuple[Stage, ...],
    first: Stage | None,
    locked: bool = False,
) -> Manifest | None:
    """The run that the directory holds. Raises UserError unless this plan can go on with it."""
    earlier = manifests.find(layout.root)
    if earlier is not None:
        manifests.refuse_another_run(earlier, plan, first)
    for stage in STAGES[: STAGES.index(stages[0])]:
        reason = "" if earlier is None else manifests.fault(earlier, plan, layout, stage, locked)
        if reason is not None:
            because = f", or not so: {reason}" if reason else ""
            raise UserError(f"--output {layout.root}: {stage} has not been done yet{because}")
    return earlier


def _run_stage(
    stage: Stage,
    plan: Plan,
    manifest: Manifest,
    layout: Layout,
    display: Display,
    pause: ServingPause,
    lock: int,
) -> None:
    earlier = manifest.model_copy(deep=True)
    reason = manifests.fault(manifest, plan, layout, stage, locked=True)
    if reason is None:
        if manifest != earlier:
            _save(manifest, plan, layout, display)
        display.skipped(stage)
        return
    if reason:
        display.again(stage, reason)
    inputs = manifests.inputs(manifest, plan, stage)
    before = manifest.stages.get(stage)
    if before is None or before.inputs != inputs:
        layout.clear(stage, keep=manifests.kept(manifest, stage, inputs))
    if before is not None:
        manifests.drop_altered(before, layout)
    # Until there is a new digest the old one stands: the stages after this one may be kept.
    digest = before.digest if before is not None else ""
    parts = manifest.stages["prepare"].parts if stage == "extract" else {}
    record = StageRecord(inputs=inputs, started=manifests.now(), digest=digest, parts=parts)
    manifest.stages[stage] = record
    _save(manifest, plan, layout, display)
    display.start(stage)
    pause.before(stage)
    begun = time.monotonic()
    for name, value in _with_space(stage, plan, layout, display, lock).items():
        setattr(record, name, value)
    stamps = {name: atomic.Stamp.of(layout.root / name) for name in record.outputs}
    record.stamps = {name: stamp for name, stamp in stamps.items() if stamp is not None}
    report = Report.merge(layout.patch_reports(stage))
    record.environment = report.environment
    record.patches = [asdict(outcome) for outcome in report.distinct()]
    record.seconds = round(time.monotonic() - begun, 3)
    record.finished = manifests.now()
    for later in STAGES[STAGES.index(stage) + 1 :]:
        there = manifest.stages.get(later)
        if there is not None and there.inputs != manifests.inputs(manifest, plan, later):
            there.finished = None
    _save(manifest, plan, layout, display)
    display.done(stage, record)


def _save(manifest: Manifest, plan: Plan, layout: Layout, display: Display) -> None:
    pause = plan.config.on_full_disk == "pause"
    disk.wait_for(layout.root, disk.FULL // 4, pause, Shown(display))
    manifest.save(layout)


def _with_space(
    stage: Stage, plan: Plan, layout: Layout, display: Display, lock: int
) -> dict[str, Any]:
    """The record of a stage that is begun again when the disk was full and is not any more."""
    while True:
        try:
            return _process(stage, plan, layout, display, lock)
        except disk.Full as full:
            if plan.config.on_full_disk == "stop":
                raise
            free = shutil.disk_usage(full.place).free
            disk.wait_for(full.place, free + disk.MORE, True, Shown(display))


class Shown(Events):
    """What the runner itself has to tell, on the display."""

    def __init__(self, display: Display) -> None:
        super().__init__()
        self._display = display

    def _send(self, **event: Any) -> None:
        self._display.event(event)


def _process(
    stage: Stage, plan: Plan, layout: Layout, display: Display, lock: int
) -> dict[str, Any]:
    """Run one stage's process to its end and return the record that it sent."""
    reports = layout.patch_reports(stage)
    shutil.rmtree(reports, ignore_errors=True)
    reports.mkdir(parents=True)
    record: dict[str, Any] = {}
    failures: list[Event] = []
    due = 0.0

    def receive(event: Event) -> None:
        if event["event"] == "result":
            record.update(event["record"])
        elif event["event"] == "failed":
            failures.append(event)
        else:
            display.event(event)

    with channel() as events, layout.log(stage).open("ab") as log:
        log.write(f"---- {manifests.now()} {stage}\n".encode())
        log.flush()
        process = subprocess.Popen(
            command(stage, plan.config.train_gpus, layout.root, events.path),
            stdin=subprocess.PIPE,  # its end tells the stage that the runner is gone
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_environment(
                # vLLM leaves its sockets where it had them.
                {"VLLM_RPC_BASE_PATH": str(events.path.parent), **os.environ},
                str(reports),
                plan.config.tensor_parallel_size,
            ),
            start_new_session=True,
            pass_fds=(lock,),  # no other run begins before the last process of this one is gone
        )
        try:
            with _ended(process):
                while process.poll() is None:
                    _forward(events.receive(0.2), receive)
                    if stage == "extract" and time.monotonic() > due:
                        processes.note(layout.shared, processes.groups(process.pid))
                        due = time.monotonic() + NOTE_SECONDS
                _forward(events.receive(0), receive)
        finally:
            processes.give_back(layout.shared)
    if not _is_there(lock, layout):  # what is not there is made anew by libraries, in silence
        raise UserError(f"--output {layout.root}: the directory is gone")
    if process.returncode == 0 and record:
        return record
    raise _failure(stage, failures, process.returncode, layout)


def command(stage: Stage, train_gpus: int | None, root: Path, events: Path) -> list[str]:
    """What runs a stage: training on several GPUs by torchrun, a process each."""
    words = ["-m", "spec_compat.pipeline.stages", stage]
    words += ["--directory", str(root), "--events", str(events)]
    ranks = (train_gpus or gpus.count()) if stage == "train" else 1
    if ranks > 1:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        words = [*torchrun, *words]
    return [sys.executable, *words]


def _environment(own: Mapping[str, str], reports: str, workers: int = 1) -> dict[str, str]:
    environment = {**ENVIRONMENT, **own, **FORCED, "SPEC_COMPAT_REPORT_DIR": reports}
    environment.pop(CONTRARY, None)
    if workers > 1:  # on a CPU vLLM refuses more workers than NUMA nodes unless this is set
        environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    plugins = environment.get("VLLM_PLUGINS")
    if plugins is not None and "spec_compat" not in plugins.split(","):
        environment["VLLM_PLUGINS"] = ",".join(filter(None, [plugins, "spec_compat"]))
    return environment


def _forward(events: Iterator[Event], receive: Callable[[Event], None]) -> None:
    for event in events:
        receive(event)


def _failure(
    stage: Stage, failures: list[Event], returncode: int, layout: Layout
) -> SpecCompatError:
    # With several ranks the first to fail is the cause, the others follow it.
    failure = failures[0] if failures else None
    if failure is not None and failure["kind"] == "full":
        return disk.Full(failure["text"], Path(failure["place"]))
    if failure is not None and failure["kind"] == "user":
        return UserError(failure["text"])
    log = _end(layout.log(stage))
    if failure is not None and TOLD_OF in failure["text"] and (told := TOLD.findall(log)):
        cause = told[-1]
    elif failure is not None:
        cause = failure["text"]
    elif returncode < 0:
        cause = processes.killed(-returncode)
    elif ranks := RANK_KILLED.findall(log):
        cause = f"a rank was {processes.killed(int(ranks[-1]))}"
    else:
        cause = f"ended with exit code {returncode}"
    return StageFailed(f"{stage}: {cause}; the log is {layout.log(stage)}")


def _is_there(lock: int, layout: Layout) -> bool:
    """Whether the run directory is still the one that was locked."""
    try:
        return os.path.samestat(os.fstat(lock), layout.lock.stat())
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
