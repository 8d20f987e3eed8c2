"""Runs the stages of a plan, one after the other, and keeps the manifest."""

from __future__ import annotations

import shutil
import time
from dataclasses import asdict
from typing import Any

from spec_compat.errors import UserError
from spec_compat.pipeline.run import manifest as manifests
from spec_compat.pipeline.run import process, staleness
from spec_compat.pipeline.run.display import Display
from spec_compat.pipeline.run.layout import Layout
from spec_compat.pipeline.run.lock import locked
from spec_compat.pipeline.run.manifest import Manifest, StageRecord
from spec_compat.pipeline.run.plan import Plan
from spec_compat.pipeline.run.servers import ServingPause
from spec_compat.pipeline.run.stage import R, Stage, Stages, selected
from spec_compat.pipeline.system import atomic, disk, processes
from spec_compat.pipeline.system.units import size
from spec_compat.report import Report


class Run:
    """The run of a plan in its output directory.

    `stages` are all that there are; `first` and `last` choose those that are done. Raises UserError
    for a choice that makes no sense.
    """

    def __init__(
        self,
        plan: Plan,
        stages: Stages,
        display: Display,
        first: str | None = None,
        last: str | None = None,
    ) -> None:
        self._plan = plan
        self._stages = stages
        self._display = display
        self._chosen = selected(stages, first, last)
        self._asked_for = self._chosen[0] if first is not None else None
        self._layout = Layout(plan.config.output)
        self._serving = ServingPause(plan.config, display.note)
        self._pause = plan.config.on_full_disk == "pause"
        self._lock = -1

    def go(self) -> Manifest:
        """Do the stages that are not done yet.

        Raises UserError for what the user can mend, StageFailed for a crash, KeyboardInterrupt when
        stopped; in each case no process of the run is left and the run can be continued.
        """
        try:
            return self._go()
        except OSError as error:
            if fault := disk.as_user_error(error, self._layout.root):
                raise UserError(f"--output {fault}") from error
            raise

    def _go(self) -> Manifest:
        self._read_weights()
        self._find()  # nothing is made where the directory cannot be this run's
        with locked(self._layout.root, self._display) as self._lock, self._serving:
            if left := processes.give_back(self._layout.shared):
                self._display.note(f"gave back {size(left)} of memory that a killed run had left")
            self._manifest = self._find() or manifests.begin(self._plan)
            self._refuse_gaps()
            self._manifest.options = self._plan.config.model_dump(mode="json")
            self._manifest.sources = self._plan.sources
            self._manifest.weights = self._plan.weights
            self._save()
            for stage in self._chosen:
                self._do(stage)
        return self._manifest

    def _read_weights(self) -> None:
        def progress(done: int, total: int) -> None:
            self._display.progress(done, note=f"of {total} files")

        self._display.doing("reading the verifier's weights, to tell when they change")
        self._plan.read_weights(progress)

    def _find(self) -> Manifest | None:
        """The run that the directory holds. Raises UserError unless this plan can go on with it."""
        found = manifests.find(self._layout.root, self._stages)
        if found is not None:
            staleness.refuse_another_run(found, self._plan, self._stages, self._asked_for)
        elif self._chosen[0] is not self._stages[0]:
            raise UserError(
                f"--output {self._layout.root}: {self._stages[0]} has not been done yet"
            )
        return found

    def _refuse_gaps(self) -> None:
        """Raise UserError when a stage before the chosen ones must be done first."""
        for stage in self._stages[: self._stages.index(self._chosen[0])]:
            due = staleness.due(self._manifest, self._plan, stage, refresh=True)
            if due is not None:
                because = f", or not so: {due.reason}" if due.reason else ""
                raise UserError(
                    f"--output {self._layout.root}: {stage} has not been done yet{because}"
                )

    def _do(self, stage: Stage[Any]) -> None:
        earlier = self._manifest.model_copy(deep=True)
        due = staleness.due(self._manifest, self._plan, stage, refresh=True)
        if due is None:
            if self._manifest != earlier:
                self._save()
            self._display.skipped(stage.name)
            return
        if due.reason:
            self._display.again(stage.name, due.reason)
        record = self._begin(stage)
        self._display.start(stage.name)
        self._serving.before(stage)
        begun = time.monotonic()
        record.result = self._with_space(stage)
        record.seconds = round(time.monotonic() - begun, 3)
        self._finish(stage, record)
        self._display.done(stage.name, record.seconds)

    def _begin(self, stage: Stage[Any]) -> StageRecord:
        """Remove what the stage does not go on with, and record that it is being done."""
        manifest, before = self._manifest, self._manifest.record(stage)
        inputs = staleness.inputs(manifest, self._plan, stage)
        if before is None or before.inputs != inputs:
            self._layout.clear(stage.writes, keep=staleness.kept(manifest, stage, inputs))
        if before is not None:
            staleness.drop_altered(before, self._layout)
        record = StageRecord(
            inputs=inputs,
            started=manifests.now(),
            # Until there is another one: the stages that read it may be up to date.
            digest=before.digest if before is not None else "",
            parts=staleness.parts(manifest, stage),
        )
        manifest.stages[stage.name] = record
        self._save()
        return record

    def _finish(self, stage: Stage[Any], record: StageRecord) -> None:
        assert record.result is not None  # noqa: S101
        record.digest = record.result.digest
        stamps = {n: atomic.Stamp.of(self._layout.root / n) for n in record.result.outputs}
        record.stamps = {name: stamp for name, stamp in stamps.items() if stamp is not None}
        report = Report.merge(self._layout.patch_reports(stage.name))
        record.environment = report.environment
        record.patches = [asdict(outcome) for outcome in report.distinct()]
        record.finished = manifests.now()
        for later in self._stages[self._stages.index(stage) + 1 :]:
            stale = self._manifest.record(later)
            if stale and stale.inputs != staleness.inputs(self._manifest, self._plan, later):
                stale.finished = None
        self._save()

    def _with_space(self, stage: Stage[R]) -> R:
        """Begin a stage again when the disk was full and is not any more."""
        while True:
            try:
                return process.run(
                    stage, self._plan.config, self._layout, self._display, self._lock
                )
            except disk.Full as full:
                if not self._pause:
                    raise
                free = shutil.disk_usage(full.place).free
                disk.wait_for(full.place, free + disk.MORE, True, self._display)

    def _save(self) -> None:
        disk.wait_for(self._layout.root, disk.FULL // 4, self._pause, self._display)
        self._manifest.save(self._layout)
