"""Benchmarks that are asked for something wrong, fail, or are stopped: one line, and no remains."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
# A benchmark of its own, for those that there are load vLLM or torch.
BENCH = """
import argparse, sys, time
from pathlib import Path
from scripts import measure

parser = argparse.ArgumentParser()
parser.add_argument("--rows", type=measure.count, default=1)
measure.scratch(parser)
given = measure.options(parser, ("quick", "fails", "lasts"), joined=("quick", "lasts"))
if given.case:
    (given.scratch / "rows").mkdir(exist_ok=True)
    for _ in range(given.rows):
        measure.record(what="speed", seconds=given.rows)
    if given.case == "fails":
        raise RuntimeError("as it was told")
    if given.case == "lasts":
        Path("pid.part").write_text(str(__import__("os").getpid()))
        Path("pid.part").rename("pid")
        time.sleep(600)
    sys.exit()
records = measure.run_cases(given)
measure.table(records, ("case", "seconds"))
measure.finish("bench", given, records, {})
sys.exit(any("failed" in record for record in records))
"""


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    Path("bench.py").write_text(BENCH)
    return [sys.executable, "bench.py", "--directory", "there", "--json", "found.json"]


def failures() -> dict[str, str]:
    content: dict[str, Any] = json.loads(Path("found.json").read_text())
    return {r["case"]: r["failed"] for r in content["results"] if "failed" in r}


def test_a_case_that_fails_is_named_the_others_run_and_nothing_is_left(bench: list[str]) -> None:
    done = subprocess.run(
        [*bench, "--cases", "fails,quick", "--rows", "3"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert "| quick | 3       |" in done.stdout
    assert failures() == {"fails": "RuntimeError: as it was told"}
    records = json.loads(Path("found.json").read_text())["results"]
    assert all(record["host_mib"] > 0 for record in records if "seconds" in record)
    assert not list(Path("there").iterdir())


def test_a_case_that_lasts_too_long_is_ended(bench: list[str]) -> None:
    done = subprocess.run([*bench, "--cases", "lasts", "--limit", "3"], capture_output=True)
    assert done.returncode == 1
    assert failures() == {"lasts": "longer than --limit 3"}


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_stopped_it_ends_the_case_and_keeps_what_was_measured(
    sent: signal.Signals, bench: list[str]
) -> None:
    process = subprocess.Popen(
        [*bench, "--cases", "quick,lasts,fails"], stdout=subprocess.PIPE, text=True
    )
    while not Path("pid").exists():
        assert process.poll() is None
        time.sleep(0.05)
    begun = time.monotonic()
    process.send_signal(sent)
    printed, _ = process.communicate(timeout=60)
    assert time.monotonic() - begun < 20
    assert process.returncode == 1
    assert "| quick | 1       |" in printed
    assert failures() == {"lasts": "stopped", "fails": "stopped"}
    with pytest.raises(ProcessLookupError):
        os.kill(int(Path("pid").read_text()), 0)
    assert not list(Path("there").iterdir())


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("--cases", "slow"), "--cases: no case is called slow"),
        (("--cases", ""), "--cases: no case is called ''"),
        (("--cases", "quick+fails"), "--cases quick+fails: fails cannot be joined with others"),
        (("--rows", "0"), "argument --rows: a whole number from 1 on, not '0'"),
        (("--rows", "-1"), "argument --rows: a whole number from 1 on, not '-1'"),
        (("--directory", "/dev/null/x"), "--directory /dev/null/x: Not a directory"),
        (("--json", "nowhere/found.json"), "--json nowhere/found.json: No such file or directory"),
    ],
)
def test_what_cannot_be_is_said_at_once(
    given: tuple[str, str], expected: str, bench: list[str]
) -> None:
    done = subprocess.run([*bench, *given], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == f"bench.py: error: {expected}"
