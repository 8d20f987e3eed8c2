"""What a stage is. The stages themselves are constants in `pipeline/stages/`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any, Generic, TypeVar

from rich.table import Table

from spec_compat.errors import UserError
from spec_compat.pipeline.inputs.verifier import Verifier
from spec_compat.pipeline.run.config import ResolvedConfig
from spec_compat.pipeline.run.events import Events
from spec_compat.pipeline.run.layout import Layout
from spec_compat.pipeline.run.manifest import Manifest, Result, StageRecord
from spec_compat.pipeline.run.plan import Dataset, Plan

R = TypeVar("R", bound=Result)


@dataclass(frozen=True)
class Job:
    """What a stage is given."""

    config: ResolvedConfig
    layout: Layout
    datasets: tuple[Dataset, ...]
    manifest: Manifest
    events: Events

    @cached_property
    def verifier(self) -> Verifier:
        return Verifier(self.config.model, self.config.trust_remote_code)


@dataclass(frozen=True, kw_only=True, eq=False)
class Stage(Generic[R]):
    """One step of a run. Its module has a function `run(job)` beside it, for its own process.

    What it makes is decided by `options` (the names of options that no stage before it reads), by
    the releases of `packages`, by its patches, by the results of the stages in `after`, and by what
    `inputs` finds. It makes the files of `writes`, paths in the run directory, and a `result`.

    `by_dataset`: a directory for each dataset, which depends on that dataset's tokens alone; when
    others change, it stays. `altered(plan, record, refresh)` says why files that are not listed in
    the result make the stage stale; with `refresh` it may keep the new times of copied files.
    `check` raises UserError when the GPUs have no room for it, `ranks` is the number of processes
    that it runs in, and `shares_memory` tells that a kill leaves files in /dev/shm.
    A stage that is not `public` always follows the one before it.
    """

    name: str
    result: type[R]
    writes: tuple[str, ...]
    after: tuple[Stage[Any], ...] = ()
    options: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    inputs: Callable[[Plan], dict[str, str]] = lambda plan: {}
    altered: Callable[[Plan, StageRecord, bool], str] = lambda plan, record, refresh: ""
    by_dataset: bool = False
    public: bool = True
    gpus: bool = False
    check: Callable[[ResolvedConfig], None] = lambda config: None
    ranks: Callable[[ResolvedConfig], int] = lambda config: 1
    shares_memory: bool = False
    summary: Callable[[R], str] = lambda result: ""
    tables: Callable[[R], list[Table]] = lambda result: []

    def __str__(self) -> str:
        return self.name

    def run(self, job: Job) -> R:
        """Do it, in this process."""
        module = import_module(f"spec_compat.pipeline.stages.{self.name}")
        made: R = module.run(job)
        return made


Stages = Sequence[Stage[Any]]


def named(stages: Stages, name: str, option: str) -> Stage[Any]:
    """The public stage of this name. Raises UserError, naming the option that asked for it."""
    public = {stage.name: stage for stage in stages if stage.public}
    if name not in public:
        raise UserError(f"{option} {name}: no such stage; there are {', '.join(public)}")
    return public[name]


def selected(stages: Stages, first: str | None, last: str | None) -> Stages:
    """The stages from `first` to `last`, with those that always follow it. Raises UserError."""
    begin = stages.index(named(stages, first, "--from")) if first else 0
    end = stages.index(named(stages, last, "--to")) + 1 if last else len(stages)
    if begin >= end:
        raise UserError(f"--from {first} comes after --to {last}")
    while end < len(stages) and not stages[end].public:
        end += 1
    return stages[begin:end]
