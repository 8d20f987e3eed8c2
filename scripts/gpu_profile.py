"""Where the time of a training step goes, on the GPU and on the host; its clock and its power."""

from __future__ import annotations

import cProfile
import io
import pstats
import statistics
import subprocess
import threading
from collections.abc import Callable
from typing import Any


class Watched:
    """The clock of the first GPU, and what it draws, every 0.1 s."""

    def __enter__(self) -> Watched:
        self._done = threading.Event()
        self._seen: list[list[float]] = []
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def medians(self) -> dict[str, float]:
        """Of the second half; zeros where there is no GPU."""
        seen = self._seen[len(self._seen) // 2 :] or [[0.0, 0.0]]
        mhz, watts = (statistics.median(column) for column in zip(*seen, strict=True))
        return {"mhz": mhz, "watts": watts}

    def _watch(self) -> None:
        query = ["--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", "--id=0"]
        while not self._done.wait(0.1):
            try:
                told = subprocess.run(
                    ["nvidia-smi", *query], capture_output=True, text=True, check=True
                ).stdout
            except (OSError, subprocess.CalledProcessError):
                return
            self._seen.append([float(number) for number in told.split(",")])


def profile(two_steps: Callable[[], float]) -> str:
    """Where the time of two steps goes, on the device and between what runs there; and on the host,
    of two steps more. `two_steps` runs them, and returns the seconds that they took."""
    import torch
    from torch.profiler import ProfilerActivity

    cuda = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with torch.profiler.profile(activities=activities) as profiled:
        seconds = two_steps()
    spans: dict[str, list[float]] = {}
    where = "CUDA" if cuda else "CPU"
    events = [event for event in profiled.events() if event.device_type.name == where]
    for event in events:
        if not (cuda and event.is_user_annotation):
            spans.setdefault(event.name, []).append(event.time_range.elapsed_us())
    order = sorted(spans, key=lambda name: -sum(spans[name]))
    lines = [f"{sum(spans[n]) / 2000:9.3f} ms {len(spans[n]) / 2:6.1f} {n[:110]}" for n in order]
    host = cProfile.Profile()
    host.runcall(two_steps)
    text = io.StringIO()
    pstats.Stats(host, stream=text).sort_stats("tottime").print_stats(30)
    pstats.Stats(host, stream=text).sort_stats("cumtime").print_stats(45)
    head = [f"a step of the two: {500 * seconds:.1f} ms", *(gaps(events) if cuda else [])]
    return "\n".join([*head, *lines[:60], text.getvalue()])


def gaps(events: list[Any]) -> list[str]:
    """How long nothing ran on the GPU, and between what for the longest."""
    spans = sorted((e.time_range.start, e.time_range.end, e.name) for e in events)
    spans = [span for span in spans if not span[2].startswith(("Optimizer.", "Activity"))]
    end, before, found = spans[0][0], "", []
    for begin, until, name in spans:
        if begin > end:
            found.append((begin - end, end, before, name))
        if until > end:
            end, before = until, name
    total = sum(gap for gap, *_ in found)
    busy = end - spans[0][0] - total
    found = sorted(found, reverse=True)[:25]
    return [
        f"busy {busy / 2000:.1f} ms a step, idle {total / 2000:.1f} ms",
        *(f"idle {g:8.0f} us at {(t - spans[0][0]) / 1e3:6.1f} ms after {a[:60]} before {b[:60]}"
          for g, t, a, b in sorted(found, key=lambda item: item[1])),
    ]  # fmt: skip
