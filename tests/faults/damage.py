"""Disks that fail, bytes that flip and files that are not ours, on runs of a tiny model.

    python -m tests.faults.damage DIRECTORY

DIRECTORY is that of the harness. Prints a line of JSON for each case, and ends with 1 if one fails.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spec_compat.errors import UserError
from spec_compat.pipeline import manifest
from spec_compat.pipeline.layout import Layout, Stage
from spec_compat.pipeline.verify import verify
from tests.faults.forked import Faults
from tests.faults.harness import Lab, differing, leftovers, preload

# One file of each kind, with the stage that makes it.
KINDS: dict[str, Stage] = {
    "prepared/talks/data-00000-of-00001.arrow": "prepare",
    "prepared/talks/token_freq.pt": "prepare",
    "gen/talks/data_3.pt": "extract",
    "gen/talks/sample_lengths.json": "extract",
    "gen/talks/data_config.json": "extract",
    "gen/talks/rows.index": "extract",
    "vocab_mapping/d2t.npy": "map",
    "vocab_mapping/t2d.npy": "map",
    "vocab_mapping/token_freq.pt": "map",
    "checkpoints/2/model.safetensors": "train",
    "checkpoints/1/optimizer_state_dict.pt": "train",
    "checkpoints/2/training_state.pt": "train",
    "checkpoints/0/config.json": "train",
    "head/model.safetensors": "export",
    "head/config.json": "export",
}
SAID = {
    errno.ENOSPC: "no space left on device",
    errno.EIO: "input/output error",
    errno.EACCES: "permission denied",
}
SMALL, LARGE = 12, 200  # MB

Case = dict[str, Any]


def flipped(file: Path, keep_time: bool) -> None:
    there = file.stat()
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    if keep_time:
        os.utime(file, ns=(there.st_mtime_ns, there.st_mtime_ns))


def flips(lab: Lab) -> Iterator[Case]:
    """The next run names the file, or with its old time `verify` does."""
    for name, stage in KINDS.items():
        run = lab.directory / "flipped"
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(lab.reference, run)
        flipped(run / name, keep_time=False)
        made = manifest.find(run)
        assert made is not None
        reason = manifest.fault(made, lab.plan(run), Layout(run), stage) or ""
        flipped(run / name, keep_time=False)
        flipped(run / name, keep_time=True)
        said = [
            problem for problem in verify(run, samples=0).problems if Path(name).name in problem
        ]
        index = name.endswith("rows.index")  # a line of it is a row that is missing
        ok = bool(reason) and bool(said or index)
        yield {"flip": name, "next run": reason, "verify": said, "ok": ok}
    run = lab.directory / "flipped"
    shutil.rmtree(run)
    shutil.copytree(lab.reference, run)
    flipped(run / "manifest.json", keep_time=True)
    try:
        manifest.find(run)
        yield {"flip": "manifest.json", "ok": False}
    except UserError as error:
        yield {"flip": "manifest.json", "next run": str(error), "ok": "manifest.json" in str(error)}


def repairs(lab: Lab) -> Iterator[Case]:
    """What is altered is made again, as it was, and only what is altered."""
    for name in ("checkpoints/2/model.safetensors", "vocab_mapping/d2t.npy", "head/config.json"):
        run = lab.directory / "flipped"
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(lab.reference, run)
        flipped(run / name, keep_time=False)
        code, shown, error = lab.run(run)
        ok = code == 0 and not differing(lab, run) and len(shown["skips"]) == 4
        yield {"repair": name, "said": shown.get("lines"), "error": error, "ok": ok}


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return Path.touch, (self.canary,)


def foreign(lab: Lab) -> Iterator[Case]:
    """A .pt file that is not ours is neither trained on nor read."""
    run, canary = lab.without("train", lab.directory / "foreign"), lab.directory / "canary"
    canary.unlink(missing_ok=True)
    for name in ("data_999.pt", "evil.pt"):
        (run / "gen" / "talks" / name).write_bytes(pickle.dumps(Evil(canary)))
    code, _, error = lab.run(run)
    differs = [name for name in differing(lab, run) if not name.endswith("data_999.pt")]
    ok = code == 0 and not differs and not canary.exists()
    yield {"foreign": "data_999.pt, evil.pt", "error": error, "differs": differs, "ok": ok}


def failures(lab: Lab) -> Iterator[Case]:
    """An operation on a file fails: one line says so, and the run goes on when it does not."""
    stages: tuple[Stage, ...] = ("prepare", "map", "train", "export")
    for turn, (number, said) in enumerate(SAID.items()):
        for stage in stages[turn % 2 :: 2]:
            run = lab.without(stage, lab.directory / "failing")

            def fail(operation: str, number: int = number, run: Path = run) -> None:
                raise OSError(number, os.strerror(number), str(run / "gen"))

            code, _, error = lab.run(run, Faults(run, 3 + turn, fail))
            again, _, _ = lab.run(run)
            good = said in error and "\n" not in error and again == 0
            ok = code == 1 and good and not differing(lab, run) and not leftovers(run)
            yield {"fails": said, "stage": stage, "error": error, "ok": ok}


def full(lab: Lab) -> Iterator[Case]:
    """A file system that is too small, and then is not."""
    small = lab.directory / "small"
    small.mkdir(exist_ok=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={LARGE}m", "tmpfs", small], check=False
    )
    if mounted.returncode:
        yield {"full": "no file system could be mounted here", "skipped": True, "ok": True}
        return

    def resize(megabytes: float) -> None:
        subprocess.run(["mount", "-o", f"remount,size={int(megabytes * 1e6)}", small], check=True)

    try:
        for policy in ("pause", "stop"):
            run = lab.without("train", small / "run")
            used = sum(file.stat().st_blocks * 512 for file in run.rglob("*"))
            resize(used / 1e6 + 0.6)
            lab.options = {"on_full_disk": policy}
            if policy == "pause":
                threading.Timer(12.0, lambda: resize(LARGE)).start()
            code, shown, error = lab.run(run)
            notes = [line.split(":")[0] for line in shown.get("lines", [])]
            ok = notes[:2] == ["paused", "going on"] and code == 0
            if policy == "stop":
                resize(LARGE)
                ok = code == 1 and "make space" in error and lab.run(run)[0] == 0
            yield {
                "full": policy,
                "said": shown.get("lines"),
                "error": error,
                "ok": ok and not differing(lab, run),
            }
            shutil.rmtree(run)
    finally:
        lab.options = {}
        subprocess.run(["umount", "-l", small], check=False)


def main() -> int:
    preload()
    lab = Lab(Path(sys.argv[1]).resolve())
    failed = 0
    for cases in (flips, repairs, foreign, failures, full):
        for case in cases(lab):
            failed += not case["ok"]
            print(json.dumps(case), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
