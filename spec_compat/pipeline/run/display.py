"""One progress display for a run, and its closing table."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO, cast

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from spec_compat.pipeline.run.events import Event
from spec_compat.pipeline.run.layout import STAGES, Stage
from spec_compat.pipeline.system.units import size

if TYPE_CHECKING:
    from spec_compat.pipeline.run.manifest import Manifest, StageRecord


class Unfailing:
    """A stream of text; what it does not take, as on a full disk, must not end a run of days."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def console() -> Console:
    """The one that a run is shown on."""
    return Console(file=cast("TextIO", Unfailing(sys.stdout)))


class Display:
    """Shows the stage at work; `event` takes what the stage sends."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("[bold]{task.fields[stage]:<8}[/]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unit]}  {task.fields[rate]}{task.fields[note]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._stage = ""
        self._since = 0.0

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def start(self, stage: Stage) -> None:
        self._stage = stage
        self._show("starting", None, "")

    def event(self, event: Event) -> None:
        if event["event"] == "doing":
            self._since = time.monotonic()
            self._show(event["text"], event["total"], event["unit"])
        elif event["event"] == "progress":
            rate = ""
            if event["tokens"]:
                seconds = max(time.monotonic() - self._since, 1e-3)
                rate = f"{event['tokens'] / seconds:,.0f} tokens/s  "
            for task in self._progress.task_ids:
                self._progress.update(task, completed=event["done"], rate=rate, note=event["note"])
        elif event["event"] == "note":
            self._line("", event["text"])

    def skipped(self, stage: Stage) -> None:
        self._line(stage, "already done")

    def again(self, stage: Stage, reason: str) -> None:
        self._line(stage, f"done again: {reason}")

    def done(self, stage: Stage, record: StageRecord) -> None:
        self._hide()
        self._line(stage, f"done in {_duration(record.seconds)}")

    def _show(self, text: str, total: int | None, unit: str) -> None:
        """One task, replaced at every step: its clock and its fields start anew."""
        self._hide()
        unit = "" if total is None else unit
        self._progress.add_task(text, total=total, stage=self._stage, unit=unit, rate="", note="")

    def _hide(self) -> None:
        for task in self._progress.task_ids:
            self._progress.remove_task(task)

    def _line(self, stage: str, text: str) -> None:
        self.console.print(f"{stage:<8} {text}", markup=False, highlight=False, soft_wrap=True)


def closing_tables(manifest: Manifest) -> list[Table]:
    """What the stages did, and what the head reached in the last validation."""
    table = Table(title="Run", title_justify="left")
    for heading in ("stage", "rows", "tokens", "on disk", "seconds", "tokens/s", "notes"):
        table.add_column(heading, justify="left" if heading in ("stage", "notes") else "right")
    for stage in STAGES:
        record = manifest.stages.get(stage)
        if record is None or record.finished is None:
            continue
        counts = record.counts
        table.add_row(
            stage,
            _number(counts.get("rows")),
            _number(counts.get("tokens")),
            size(record.bytes) if record.bytes else "",
            f"{record.seconds:,.1f}",
            _number(counts.get("tokens_per_second")),
            _notes(stage, record),
        )
    tables = [table]
    train = manifest.stages.get("train")
    if train is not None and train.finished and train.counts.get("validation"):
        tables.append(_validation(train))
    return tables


def _validation(train: StageRecord) -> Table:
    metrics, acceptance = train.counts["validation"], train.counts["acceptance"]
    caption = f"expected acceptance length: {train.counts['expected_acceptance_length']:.2f}"
    if (own := train.counts.get("own_answers")) is not None:
        caption += f"; the verifier itself would have said {own:.0%} of this text"
    table = Table(
        title=f"Validation after epoch {train.counts['epochs']}",
        caption=caption,
        title_justify="left",
        caption_justify="left",
    )
    for heading in ("speculative step", "loss", "accepted", "accepted if the steps before are"):
        table.add_column(heading, justify="right")
    following = train.counts.get("following_acceptance")  # a run may be older than that
    for step, share in enumerate(acceptance):
        table.add_row(
            str(step + 1),
            f"{metrics[f'loss_{step}']:.3f}",
            f"{share:.1%}",
            f"{following[step]:.1%}" if following else "not known",
        )
    return table


def _notes(stage: Stage, record: StageRecord) -> str:
    counts = record.counts
    if stage == "prepare":
        return (
            f"{counts['trainable_tokens']:,} trainable tokens, {counts['dropped']:,} rows dropped"
        )
    if stage == "extract":
        return f"layers {', '.join(map(str, counts['layer_ids']))}"
    if stage == "map":
        return (
            f"{counts['draft_vocab_size']:,} draft tokens cover "
            f"{counts['coverage']:.2%} of the trainable tokens"
        )
    if stage == "train":
        steps = f"{counts['steps']:,} steps, {counts['epochs']} epochs"
        waited = counts.get("waited_for_data")
        return steps if waited is None else f"{steps}, {waited:.1%} waiting for data"
    return ""


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"
