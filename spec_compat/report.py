"""What happened to each patch in each process: the proof that travels with the data.

`import spec_compat` imports this module: pathlib, which is not cheap, is imported where it is used.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Set
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Literal, get_args

from spec_compat.patching import Scope, Severity

if TYPE_CHECKING:
    from pathlib import Path

State = Literal[
    "skipped", "armed", "pending", "applied", "not-needed",
    "moved", "foreign", "failed", "lost", "undone",
]  # fmt: skip
REGISTRY = "vllm.model_executor.models.registry"
IN_PLACE = frozenset[State]({"applied", "not-needed"})
WRONG = frozenset[State]({"pending", "moved", "foreign", "failed", "lost"})


@dataclass(frozen=True)
class Outcome:
    """The state of one patch in one process.

    skipped: not nominated, or disabled. armed: waits for its module. pending: its module was still
    being imported. applied, not-needed: in place. moved: the module is not what the patch knows.
    foreign: someone else's object stands where ours should be undone. failed: raised, rolled back.
    lost: was applied, and is no longer. undone: taken out on request.

    `late` tells that the module was imported before the patch was armed. `role` is "driver" in a
    main process and the process's own name in a child. `time` is seconds since the epoch.
    """

    id: str
    state: State
    stage: str
    scope: Scope
    severity: Severity
    target: str
    reason: str
    late: bool
    pid: int
    role: str
    time: float

    @property
    def is_problem(self) -> bool:
        """A required patch in a state that is wrong wherever it is met."""
        return self.severity == "required" and self.state in WRONG

    def is_asked_for(self, scope: Scope | None = None, stage: str | None = None) -> bool:
        """A required patch of the scope and stage that was not skipped."""
        matching = scope in (None, self.scope) and stage in (None, self.stage)
        return matching and self.severity == "required" and self.state != "skipped"


@dataclass(frozen=True)
class Report:
    """The outcomes of one process, or of all processes of a run, and the releases they met."""

    environment: dict[str, str]
    outcomes: tuple[Outcome, ...]

    def problems(self) -> tuple[Outcome, ...]:
        """The required patches that are in a wrong state, in any process."""
        return tuple(outcome for outcome in self.outcomes if outcome.is_problem)

    def distinct(self) -> tuple[Outcome, ...]:
        """One of those that differ in the process alone: every epoch has loaders of its own."""
        first = dict[Outcome, Outcome]()
        for outcome in self.outcomes:
            kind = outcome.role.rstrip("-0123456789")
            first.setdefault(replace(outcome, pid=0, role=kind, time=0.0), outcome)
        return tuple(first.values())

    def processes_with(self, ids: Set[str]) -> tuple[int, ...]:
        """The process ids of those child processes that have all these patches in place."""
        there = dict[int, set[str]]()
        for outcome in self.outcomes:
            if outcome.role != "driver" and outcome.state in IN_PLACE:
                there.setdefault(outcome.pid, set()).add(outcome.id)
        return tuple(pid for pid, found in there.items() if ids <= found)

    def summary(self) -> str:
        """One line: releases, counts by state, problems, process."""
        found = {"vllm": "not installed", "speculators": "not installed", **self.environment}
        states = Counter(outcome.state for outcome in self.outcomes if not outcome.is_problem)
        counts = [f"{states[s]} {s.replace('-', ' ')}" for s in get_args(State) if states[s]]
        counts.append(f"{len(self.problems())} problems")
        roles = ", ".join(dict.fromkeys(outcome.role for outcome in self.outcomes)) or role()
        return (
            f"spec_compat {found['spec_compat']}: vLLM {found['vllm']}, "
            f"speculators {found['speculators']}: {', '.join(counts)} ({roles})"
        )

    @classmethod
    def merge(cls, directory: str | Path) -> Report:
        """The last outcome of each patch in each process that wrote to the report directory.

        A line that was cut short by a dying process counts as not written.
        """
        from pathlib import Path

        environment = dict[str, str]()
        last = dict[tuple[int, str], Outcome]()
        for file in sorted(Path(directory).glob("*.jsonl")):
            for line in file.read_text(encoding="utf-8").splitlines():
                try:
                    record = json.loads(line)
                    met: dict[str, str] = record.pop("environment")
                    outcome = Outcome(**record)
                except (ValueError, TypeError, KeyError):
                    continue
                last[outcome.pid, outcome.id] = outcome
                for name, release in met.items():
                    if release not in environment.setdefault(name, release).split(" | "):
                        environment[name] += f" | {release}"
        return cls(environment, tuple(last.values()))


def append(directory: str, environment: Mapping[str, str], outcomes: Iterable[Outcome]) -> None:
    """Add this process's outcomes to `<directory>/<pid>.jsonl`, one line each, in one write."""
    from pathlib import Path

    lines = [json.dumps(asdict(o) | {"environment": dict(environment)}) + "\n" for o in outcomes]
    Path(directory).mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    descriptor = os.open(Path(directory, f"{os.getpid()}.jsonl"), flags, 0o644)
    try:
        os.write(descriptor, "".join(lines).encode())
    finally:
        os.close(descriptor)


def role() -> str:
    """The name that multiprocessing gave to this process; "driver" for a main process.

    vLLM looks at a model's class in a main process of its own, which drives nothing.
    """
    processes = sys.modules.get("multiprocessing.process")
    name: str = processes.current_process().name if processes else "MainProcess"
    if name != "MainProcess":
        return name
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return "model registry" if getattr(spec, "name", "") == REGISTRY else "driver"
