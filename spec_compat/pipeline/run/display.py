"""One progress display for a run, and its closing table."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO, cast

from rich import progress as bars
from rich.console import Console
from rich.table import Table

from spec_compat.pipeline.run.events import Doing, Event, Note, Progress
from spec_compat.pipeline.system.units import size

if TYPE_CHECKING:
    from spec_compat.pipeline.run.manifest import Manifest
    from spec_compat.pipeline.run.stage import Stages


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
    """Shows the stage at work: `event` takes what it sends, other methods what the runner says."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._progress = bars.Progress(
            bars.SpinnerColumn(),
            bars.TextColumn("[bold]{task.fields[stage]:<8}[/]{task.description}"),
            bars.BarColumn(bar_width=24),
            bars.MofNCompleteColumn(),
            bars.TextColumn("{task.fields[unit]}  {task.fields[rate]}{task.fields[note]}"),
            bars.TimeElapsedColumn(),
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

    def start(self, stage: str) -> None:
        self._stage = stage
        self._show("starting", None, "")

    def event(self, event: Event) -> None:
        if isinstance(event, Doing):
            self.doing(event.text, event.total, event.unit)
        elif isinstance(event, Progress):
            self.progress(event.done, event.tokens, event.note)
        elif isinstance(event, Note):
            self.note(event.text)

    def doing(self, text: str, total: int | None = None, unit: str = "rows") -> None:
        self._since = time.monotonic()
        self._show(text, total, unit)

    def progress(self, done: int, tokens: int | None = None, note: str = "") -> None:
        seconds = max(time.monotonic() - self._since, 1e-3)
        rate = f"{tokens / seconds:,.0f} tokens/s  " if tokens else ""
        for task in self._progress.task_ids:
            self._progress.update(task, completed=done, rate=rate, note=note)

    def note(self, text: str) -> None:
        self._line("", text)

    def skipped(self, stage: str) -> None:
        self._line(stage, "already done")

    def again(self, stage: str, reason: str) -> None:
        self._line(stage, f"done again: {reason}")

    def done(self, stage: str, seconds: float) -> None:
        self._hide()
        self._line(stage, f"done in {_duration(seconds)}")

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


def closing_tables(manifest: Manifest, stages: Stages) -> list[Table]:
    """What the stages did, a row each, and the tables that they have of their own."""
    table = Table(title="Run", title_justify="left")
    for heading in ("stage", "rows", "tokens", "on disk", "seconds", "tokens/s", "notes"):
        table.add_column(heading, justify="left" if heading in ("stage", "notes") else "right")
    tables = [table]
    for stage in stages:
        record, result = manifest.record(stage), manifest.result(stage)
        if record is None or result is None:
            continue
        table.add_row(
            stage.name,
            _number(result.rows),
            _number(result.tokens),
            size(result.bytes) if result.bytes else "",
            f"{record.seconds:,.1f}",
            _number(result.tokens_per_second),
            stage.summary(result),
        )
        tables += stage.tables(result)
    return tables


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"
