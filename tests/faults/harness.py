"""Kills a run of a tiny model at many points, goes on, and compares with a run that was not killed.

    python -m tests.faults.harness DIRECTORY --points 100 [--stages train,map]

DIRECTORY holds the finished run that all begin from; it is made when it is not there. Prints a line
of JSON for each point, and ends with 1 if one run ended in something else.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import spec_compat  # noqa: F401
from spec_compat.errors import SpecCompatError, UserError
from spec_compat.pipeline.run import config, plan, process
from spec_compat.pipeline.run.events import Event, Note
from spec_compat.pipeline.run.layout import Layout
from spec_compat.pipeline.run.manifest import Manifest, find
from spec_compat.pipeline.run.runner import Run
from spec_compat.pipeline.stages import STAGES
from spec_compat.pipeline.system import processes
from tests import tiny_models
from tests.faults.forked import Faults, Stages, is_gone, kill_group, members

OPTIONS: dict[str, Any] = {
    "seq_length": 64,
    "batch_size": 2,
    "draft_vocab_size": 128,
    "epochs": 3,
    "lr": 0.001,
    "total_seq_len": 128,
    "num_workers": 1,
    "num_preprocessing_workers": 1,
    "seed": 5,
}
ROWS = 12
# The same for every run, whatever happens to it.
RESULTS = (
    "prepared/talks/token_freq.pt",
    "gen/*/data_*.pt",
    "gen/*/sample_lengths.json",
    "gen/*/data_config.json",
    "vocab_mapping/*",
    "checkpoints/*/*",
    "head/*",
    "logs/metrics.jsonl",
)
# How the run is killed: the stage with its workers, the runner alone, or the runner asked to stop;
# and, where there are any, a worker of the stage alone.
KILLS = ("stage", "runner", "sigterm")
EXTRACT_KILLS = (*KILLS, "worker")
# When: at an operation on files of the stage's own process, after a time, or when workers have
# written so many rows.
WAYS = ("operation", "time", "files")
GONE_SECONDS = 60.0


class Quiet:
    """A display that keeps which stages were done again, and writes down notes as they come."""

    def __init__(self, notes: Path) -> None:
        self.notes = notes
        self.skips: list[str] = []
        self.lines: list[str] = []

    def skipped(self, stage: str) -> None:
        self.skips.append(stage)

    def again(self, stage: str, reason: str) -> None:
        self.lines.append(f"{stage}: {reason}")

    def event(self, event: Event) -> None:
        if isinstance(event, Note):
            self.note(event.text)

    def note(self, text: str) -> None:
        self.lines.append(text)
        self.notes.write_text("\n".join(self.lines))

    def doing(self, text: str, total: int | None = None) -> None:
        pass

    def progress(self, done: int, note: str = "") -> None:
        pass

    def start(self, stage: str) -> None:
        pass

    def done(self, stage: str, seconds: float) -> None:
        pass


class Lab:
    """A directory with a model, data, and the run that all others are held against."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self.model, self.data = directory / "model", directory / "talks.jsonl"
        self.reference, self.counted = directory / "reference", directory / "counted"
        self.options: dict[str, Any] = {}
        if not self.data.exists():
            tiny_models.make_tiny_llama(self.model)
            tiny_models.write_conversations(self.data, ROWS)
        if not (self.reference / "head").exists():
            shutil.rmtree(self.reference, ignore_errors=True)
            self.counted.mkdir(exist_ok=True)
            code, _, error = self.run(self.reference, Faults(self.reference, counted=self.counted))
            if code:
                raise SystemExit(f"the run that is not killed failed: {error}")
        self.expected = results(self.reference)

    def plan(self, run: Path) -> plan.Plan:
        given = {"model": str(self.model), "data": [str(self.data)], "output": run}
        return plan.make(config.load({**given, **OPTIONS, **self.options}))

    def run(
        self,
        run: Path,
        faults: Faults | None = None,
        kill: str = "",
        after: float = 0.0,
        files: int = 0,
    ) -> tuple[int, dict[str, Any], str]:
        """Run in a fork; its exit code, what it showed, and its error.

        It is killed this many seconds after a stage has begun, or when it has written these files.
        """
        # Not beside the run, whose disk may be full.
        groups, answer = (self.directory / f"{run.name}.{part}" for part in ("groups", "answer"))
        for file in (groups, answer, self.notes(run)):
            file.unlink(missing_ok=True)
        pid = os.fork()
        if pid == 0:
            self._run(run, faults or Faults(run), groups, answer)
        if kill:
            while not begun(groups) and not answer.exists():
                time.sleep(0.005)
            time.sleep(after)
            while len(list(run.glob("gen/*/*data_*"))) < files and not answer.exists():
                time.sleep(0.0002)
            strike(kill, pid, groups)
        _, status = os.waitpid(pid, 0)
        shown = json.loads(answer.read_text()) if answer.exists() else {"error": ""}
        wait_until_gone(groups)
        wait_until_free(run / ".lock")
        return os.waitstatus_to_exitcode(status), shown, shown["error"]

    def notes(self, run: Path) -> Path:
        """What a run says while it runs."""
        return self.directory / f"{run.name}.notes"

    def _run(self, run: Path, faults: Faults, groups: Path, answer: Path) -> None:
        code, display, error = 70, Quiet(self.notes(run)), ""
        try:
            process.subprocess = Stages(faults, groups)  # type: ignore[attr-defined]
            try:
                with processes.stopped_once():
                    Run(self.plan(run), STAGES, display).go()  # type: ignore[arg-type]
                code = 0
            except SpecCompatError as failure:
                code, error = 2 if isinstance(failure, UserError) else 1, str(failure)
            except KeyboardInterrupt:
                code = 130
            shown = {"skips": display.skips, "lines": display.lines, "error": error}
            answer.write_text(json.dumps(shown))
        finally:
            os._exit(code)

    def without(self, stage: str, run: Path) -> Path:
        """A copy of the finished run in which this stage was not done; those after it were."""
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(self.reference, run)
        layout = Layout(run)
        made = manifest(run)
        del made.stages[stage]
        made.save(layout)
        layout.clear(next(s.writes for s in STAGES if s.name == stage))
        return run

    def operations(self, stage: str) -> tuple[int, float]:
        """Operations on files of the run that the stage does, and its seconds."""
        seconds = manifest(self.reference).stages[stage].seconds
        return int((self.counted / stage).read_text()), seconds


def manifest(run: Path) -> Manifest:
    found = find(run, STAGES)
    assert found is not None
    return found


def begun(groups: Path) -> list[int]:
    """The groups of the stages that have begun; a file that is there may not be written yet."""
    return [int(group) for group in groups.read_text().split()] if groups.exists() else []


def strike(kill: str, runner_pid: int, groups: Path) -> None:
    if not begun(groups):
        return  # it has ended before its first stage
    try:
        if kill == "stage":
            os.killpg(begun(groups)[-1], signal.SIGKILL)
        elif kill == "worker":
            for worker in members(begun(groups)[-1])[-1:]:
                os.kill(worker, signal.SIGKILL)
        else:
            os.kill(runner_pid, signal.SIGKILL if kill == "runner" else signal.SIGTERM)
    except ProcessLookupError:
        pass  # it was sooner


def wait_until_gone(groups: Path) -> None:
    """Raise unless every process of every stage ends by itself."""
    deadline = time.monotonic() + GONE_SECONDS
    for group in begun(groups):
        while not is_gone(group):
            if time.monotonic() > deadline:
                raise SystemExit(f"processes of the stage {group} are left")
            time.sleep(0.05)


def wait_until_free(lock: Path) -> None:
    """The process that tidies up after the others holds the run a moment longer than they do."""
    deadline = time.monotonic() + GONE_SECONDS
    while lock.is_file():
        with lock.open() as held:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise SystemExit(f"{lock} is still held") from None
            else:
                return
        time.sleep(0.02)


def results(run: Path) -> dict[str, str]:
    files = [file for pattern in RESULTS for file in sorted(run.glob(pattern))]
    return {
        file.relative_to(run).as_posix(): hashlib.sha256(content(file)).hexdigest()
        for file in files
    }


def content(file: Path) -> bytes:
    """Bytes of a file, without when, where and by which command it was made."""
    data = file.read_bytes()
    if file.name == "data_config.json":
        found = json.loads(data)
        for part in found.values():
            if isinstance(part, dict):
                part.pop("cache_dir", None)
                part.pop("command", None)
        found = {k: v for k, v in found.items() if k not in ("generated_at", "cache_dir")}
        data = json.dumps(found).encode()
    return data


def differing(lab: Lab, run: Path) -> list[str]:
    there = results(run)
    names = there.keys() | lab.expected.keys()
    return sorted(name for name in names if there.get(name) != lab.expected.get(name))


def leftovers(run: Path) -> list[str]:
    """Hidden files that a run made on its way and did not take away."""
    hidden = (path for path in run.rglob(".*") if path.name != ".lock")
    return sorted(path.relative_to(run).as_posix() for path in hidden)


def points(lab: Lab, shares: dict[str, int], seed: int) -> Iterator[dict[str, Any]]:
    """So many points spread over each stage, killed in turns."""
    chance = random.Random(seed)
    turn = 0
    for stage, share in shares.items():
        operations, seconds = lab.operations(stage)
        for place in range(share):
            kills = EXTRACT_KILLS if stage == "extract" else KILLS
            kill = kills[turn % len(kills)]
            turn += 1
            part = (place + chance.random()) / share
            way = WAYS[(place + turn // len(kills)) % (3 if stage == "extract" else 2)]
            at = {
                "operation": 1 + int(part * operations),
                "time": round(max(0.01, part * seconds), 3),
                "files": 1 + int(part * ROWS),
            }[way]
            yield {"stage": stage, "by": way, "at": at, "kill": kill}


def try_point(lab: Lab, point: dict[str, Any]) -> dict[str, Any]:
    run = lab.without(point["stage"], lab.directory / "killed")
    code, error = _struck(lab, run, point)
    while code == 0 and point["at"] > 1e-2:  # it had ended before
        point["at"] = point["at"] // 2 if point["by"] != "time" else round(point["at"] / 2, 3)
        run = lab.without(point["stage"], run)
        code, error = _struck(lab, run, point)
    begun = time.monotonic()
    after, shown, resumed = lab.run(run)
    found = {**point, "code": code, "error": error, "seconds": round(time.monotonic() - begun, 1)}
    found["differs"] = differing(lab, run) if after == 0 else [resumed]
    found["left"] = leftovers(run)
    expected = [stage.name for stage in STAGES if stage.name != point["stage"]]
    skips = shown.get("skips", [])
    found["redone"] = [stage for stage in expected if stage not in skips]
    found["ok"] = not (found["differs"] or found["left"] or found["redone"])
    return found


def _struck(lab: Lab, run: Path, point: dict[str, Any]) -> tuple[int, str]:
    """The exit code and the error of a run that is killed at a point."""
    kill, at, faults = point["kill"], point["at"], None
    when = {"time": {"after": at}, "files": {"files": at}}.get(point["by"])
    if when is None:
        faults, kill, when = Faults(run, at, partial(_strike_from_stage, kill)), "", {}
    code, _, error = lab.run(run, faults, kill, **when)
    return code, error


def _strike_from_stage(kill: str, operation: str) -> None:
    if kill in ("stage", "worker"):
        kill_group("")
    os.kill(os.getppid(), signal.SIGKILL if kill == "runner" else signal.SIGTERM)
    time.sleep(30)  # until somebody ends this process, as it would be in the middle of its work


def preload() -> None:
    """What the stages import, once for all of them."""
    import datasets  # noqa: F401
    import speculators.data_generation.vllm_hidden_states_generator
    import speculators.train.trainer  # noqa: F401
    import torch

    torch.set_num_threads(1)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--points", type=int, default=100)
    parser.add_argument("--stages", default=",".join(map(str, STAGES)))
    parser.add_argument(
        "--extract", type=int, help="points in extract, the slowest (default: a share)"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    preload()
    lab = Lab(options.directory.resolve())
    failed = 0
    stages = options.stages.split(",")
    shares = dict.fromkeys(stages, max(1, options.points // len(stages)))
    if options.extract is not None:
        shares["extract"] = options.extract
    for point in points(lab, shares, options.seed):
        found = try_point(lab, point)
        failed += not found["ok"]
        print(json.dumps(found), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
