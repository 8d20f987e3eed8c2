"""Disks that fail, bytes that flip and files that are not ours, on runs of a tiny model.

    python -m tests.faults.damage DIRECTORY [flips,full]

DIRECTORY is that of the harness; the cases named, or all of them, are tried. Prints a line of JSON
for each, and ends with 1 if one fails.
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
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from spec_compat.errors import UserError
from spec_compat.pipeline.rows.index import Index
from spec_compat.pipeline.run import staleness
from spec_compat.pipeline.run.layout import Layout
from spec_compat.pipeline.stages import STAGES
from spec_compat.pipeline.system import disk
from spec_compat.pipeline.verify import verify
from tests.faults.forked import Faults
from tests.faults.harness import Lab, differing, leftovers, manifest, preload

# One file of each kind, with the stage that makes it.
KINDS: dict[str, str] = {
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
    errno.ESTALE: "stale file handle",
}
LARGE = 200  # MB
TEMPLATE = "the chat template has changed"

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
        made = next(s for s in STAGES if s.name == stage)
        due = staleness.due(manifest(run), lab.plan(run), made)
        reason = due.reason if due else ""
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
        manifest(run)
        yield {"flip": "manifest.json", "ok": False}
    except UserError as error:
        yield {"flip": "manifest.json", "next run": str(error), "ok": "manifest.json" in str(error)}


def repairs(lab: Lab) -> Iterator[Case]:
    """What is altered is made again, as it was, and only what is altered."""
    for name in (
        "gen/talks/sample_lengths.json",
        "checkpoints/2/model.safetensors",
        "vocab_mapping/d2t.npy",
        "head/config.json",
    ):
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
    stages: tuple[str, ...] = ("prepare", "map", "train", "export")
    for turn, (number, said) in enumerate(SAID.items()):
        for stage in stages[turn % 2 :: 2]:
            run = lab.without(stage, lab.directory / "failing")

            def fail(operation: str, number: int = number, run: Path = run) -> None:
                raise OSError(number, os.strerror(number), str(run / "gen"))

            lab.options = {"on_full_disk": "stop"}
            code, _, error = lab.run(run, Faults(run, 3 + turn, fail))
            lab.options = {}
            again, _, _ = lab.run(run)
            good = said in error and "\n" not in error and again == 0
            ok = code == 2 and good and not differing(lab, run) and not leftovers(run)
            yield {"fails": said, "stage": stage, "error": error, "ok": ok}


def vanishing(lab: Lab) -> Iterator[Case]:
    """The directory of the run is taken away while a stage writes into it."""
    run = lab.without("train", lab.directory / "vanishing")
    aside = run.with_name("aside")
    shutil.rmtree(aside, ignore_errors=True)
    code, _, error = lab.run(run, Faults(run, 30, lambda _: run.rename(aside) and None))
    ok = code == 2 and error.endswith("the directory is gone")
    shutil.rmtree(run, ignore_errors=True)
    again, _, _ = lab.run(aside.rename(run))
    yield {"vanishes": "train", "error": error, "ok": ok and again == 0 and not differing(lab, run)}


def without_rows(lab: Lab) -> Iterator[Case]:
    """No inode is left for the next row; it goes on when there is one."""
    small = lab.directory / "small"
    small.mkdir(exist_ok=True)

    def inodes(number: int) -> None:
        subprocess.run(["mount", "-o", f"remount,nr_inodes={number}", small], check=True)

    if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", small], check=False).returncode:
        return
    try:
        run = lab.without("extract", small / "run")
        lab.options = {"max_disk": "100kB"}
        code, _, error = lab.run(run)
        yield {"max-disk": error, "ok": code == 2 and error.startswith("--max-disk 100.0 kB: ")}
        lab.options = {}
        space = os.statvfs(small)
        inodes(space.f_files - space.f_ffree + 10)
        code, _, error = lab.run(run)
        kept = len(Index(run / "gen" / "talks"))
        inodes(9999)
        again, _, _ = lab.run(run)
        ok = code == 2 and SAID[errno.ENOSPC] in error and again == 0 and not differing(lab, run)
        yield {"full": "extract", "rows kept": kept, "error": error, "ok": ok}
    finally:
        lab.options = {}
        subprocess.run(["umount", "-l", small], check=False)


def changes(lab: Lab) -> Iterator[Case]:
    """Done again is what depends on a change, and no more."""
    run, model = lab.directory / "changed", lab.model
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(lab.reference, run)
    config = model / "tokenizer_config.json"
    before = config.read_text()
    content = json.loads(before)
    template = model / "chat_template.jinja"
    if template.exists():
        config, before = template, template.read_text()
    content["chat_template"] = content.get("chat_template", "") + "{# the same tokens #}"
    words = before + "{# the same tokens #}" if config == template else json.dumps(content)

    def case(name: str, lines: list[str], skipped: int) -> Case:
        code, shown, error = lab.run(run)
        alike = len(shown["lines"]) == len(lines) and all(
            map(str.startswith, shown["lines"], lines)
        )
        ok = code == 0 and alike and len(shown["skips"]) == skipped
        return {"change": name, "said": shown["lines"], "error": error, "ok": ok}

    for file in [*run.rglob("*"), *model.iterdir(), lab.data]:
        os.utime(file)
    yield case("the times of all files", [], 5)
    try:
        config.write_text(words)
        yield case("a template that gives the same tokens", [f"prepare: {TEMPLATE}"], 4)
    finally:
        config.write_text(before)
    lab.model = model.rename(model.with_name("moved"))
    try:
        again = [f"prepare: {TEMPLATE}", "export: --verifier-name "]
        yield case("a model that has moved, with the template of before", again, 3)
    finally:
        lab.model = lab.model.rename(model)


def pickled(lab: Lab) -> Iterator[Case]:
    """A checkpoint that would run code, of a trainer that wrote no checksums."""
    for name in ("optimizer_state_dict.pt", "scheduler_state_dict.pt", "random_state_0.pt"):
        run, canary = lab.without("train", lab.directory / "pickled"), lab.directory / "canary"
        canary.unlink(missing_ok=True)
        last = run / "checkpoints" / "0"
        shutil.copytree(lab.reference / "checkpoints" / "0", last)
        (last / "SHA256SUMS").unlink()
        torch.save(Evil(canary), last / name)
        record = manifest(lab.reference)
        record.stages["train"].finished = None
        record.stages["train"].result = None  # an altered file that it lists is not even read
        record.save(Layout(run))
        code, _, error = lab.run(run)
        ok = code == 1 and "UnpicklingError" in error and not canary.exists()
        yield {"pickled": name, "error": error, "ok": ok}


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

    def make_space(notes: Path) -> None:
        deadline = time.monotonic() + 120
        while "paused" not in (notes.read_text() if notes.exists() else ""):
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        resize(LARGE)

    try:
        # Training knows what it needs; the runner waits for what its manifest needs; and a stage
        # that another program has taken the space from is begun again.
        cases: tuple[tuple[str, str, float], ...] = (
            ("train", "pause", 0.6),
            ("train", "stop", 0.6),
            ("map", "pause", 0.0),
            ("export", "pause", 0.6),
        )
        for stage, policy, free in cases:
            run = lab.without(stage, small / "run")

            def fail(operation: str, run: Path = run) -> None:
                if shutil.disk_usage(run).free < disk.MORE:
                    raise OSError(errno.ENOSPC, "no space", str(run / "head" / "config.json"))

            used = sum(file.stat().st_blocks * 512 for file in run.rglob("*"))
            resize(used / 1e6 + free)
            lab.options = {"on_full_disk": policy}
            lab.notes(run).unlink(missing_ok=True)  # of the case before, which paused too
            making_space = threading.Thread(target=make_space, args=(lab.notes(run),))
            if policy == "pause":
                making_space.start()
            code, shown, error = lab.run(run, Faults(run, 3, fail) if stage == "export" else None)
            if policy == "pause":
                making_space.join()
            notes = [line.split(":")[0] for line in shown.get("lines", [])]
            ok = notes[:2] == ["paused", "going on"] and code == 0
            if policy == "stop":
                resize(LARGE)
                ok = code == 2 and "make space" in error and lab.run(run)[0] == 0
            yield {
                "full": policy,
                "stage": stage,
                "said": shown.get("lines"),
                "error": error,
                "ok": ok and not differing(lab, run),
            }
            shutil.rmtree(run)
    finally:
        lab.options = {}
        subprocess.run(["umount", "-l", small], check=False)


PARTS = (
    flips,
    repairs,
    foreign,
    pickled,
    failures,
    vanishing,
    changes,
    full,
    without_rows,
)


def main() -> int:
    preload()
    lab = Lab(Path(sys.argv[1]).resolve())
    failed = 0
    chosen = sys.argv[2].split(",") if len(sys.argv) > 2 else [part.__name__ for part in PARTS]
    for part in PARTS:
        for case in part(lab) if part.__name__ in chosen else ():
            failed += not case["ok"]
            print(json.dumps(case), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
