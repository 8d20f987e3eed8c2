"""The progress bars that libraries draw with tqdm, as progress of a stage."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

POLL_SECONDS = 0.2


class Progress(Protocol):
    """Who is told."""

    def doing(self, text: str, total: int | None = None) -> None:
        """A new step, and the number of units that it will take, if known."""

    def progress(self, done: int) -> None:
        """Units done since `doing`."""


@contextmanager
def reported(progress: Progress, name: str) -> Iterator[None]:
    """Report the newest bar of this process while the block runs, as `DESCRIPTION (name)`.

    The bars are read out of tqdm's own registry by a thread; they are drawn as before, as often as
    TQDM_MININTERVAL says.
    """
    ended = threading.Event()
    reporter = threading.Thread(target=_report, args=(progress, name, ended), daemon=True)
    reporter.start()
    try:
        yield
    finally:
        ended.set()
        reporter.join()


def _report(progress: Progress, name: str, ended: threading.Event) -> None:
    shown: object = None
    while not ended.wait(POLL_SECONDS):
        bar = _newest()
        if bar is None:
            continue
        step = (bar.start_t, bar.desc, bar.total)
        if step != shown:
            progress.doing(f"{bar.desc or 'preparing'} ({name})", bar.total)
            shown = step
        progress.progress(bar.n)


def _newest() -> Any:
    """The live bar that was begun last; None where there is none."""
    import tqdm.std  # type: ignore[import-untyped]

    # Without tqdm's lock: a process that is forked while it is held would wait for it for ever.
    try:
        bars = [bar for bar in tqdm.std.tqdm._instances if hasattr(bar, "start_t")]
    except RuntimeError:  # a bar was begun at this moment
        return None
    return max(bars, key=lambda bar: bar.start_t, default=None)
