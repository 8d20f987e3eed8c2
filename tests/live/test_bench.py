"""The benchmarks run, on what they make themselves and without being installed."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.live, pytest.mark.slow]

ROOT = Path(__file__).parents[2]


def results(script: str, *options: str, directory: Path) -> dict[str, Any]:
    """What a benchmark wrote, with the last record of each case."""
    found = directory / "found.json"
    places = ["--directory", str(directory / "bench"), "--json", str(found)]
    command = [sys.executable, "-m", f"scripts.{script}", *options, *places]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    content: dict[str, Any] = json.loads(found.read_text())
    return {**content, "results": {record["case"]: record for record in content["results"]}}


def test_every_storage_is_measured_on_the_same_rows(tmp_path: Path) -> None:
    options = ["--geometry", "tiny", "--rows", "4", "--length", "64", "--repeats", "1"]
    cases = ["--cases", "extract+shards+fp8+zstd"]
    found = results("bench_extract", *options, *cases, directory=tmp_path)["results"]
    assert {record["tokens"] for record in found.values()} == {256}
    size = {case: record["bytes_per_token"] for case, record in found.items()}
    assert size["fp8"] < size["zstd"] < size["shards"] < size["extract"]


def test_every_loader_gives_the_same_tokens(tmp_path: Path) -> None:
    options = ["--rows", "16", "--length", "64", "--hidden-size", "64", "--batch-tokens", "128"]
    cases = ["--workers", "1", "--cases", "speculators+rows+shards+fp8+zstd"]
    content = results("bench_loader", *options, *cases, directory=tmp_path)
    assert {record["tokens"] for record in content["results"].values()} == {16 * 63}
    assert all(record["cpu_seconds"] > 0 for record in content["results"].values())
    compared = [f"{case}/speculators" for case in ("rows", "shards", "fp8", "zstd")]
    assert {ratio.split(" in ")[0] for ratio in content["ratios"]} == set(compared)


def test_every_trainer_has_the_same_losses(tmp_path: Path) -> None:
    cases = ["--cases", "speculators,loss,float32", "--tiny", "--steps", "2"]
    found = results("bench_train", *cases, directory=tmp_path)["results"]
    expected = found["speculators"]["curve"]
    assert found["float32"]["curve"] == pytest.approx(expected, rel=1e-3)
    assert found["loss"]["curve"] == pytest.approx(expected, rel=1e-2)
