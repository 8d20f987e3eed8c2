"""The benchmark of extraction runs, on a model of its own making and without being installed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.live, pytest.mark.slow]

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_extract.py"


def test_every_storage_is_measured_on_the_same_rows(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    options = ["--geometry", "tiny", "--rows", "4", "--length", "64", "--repeats", "1"]
    cases = ["--cases", "extract+shards+fp8+zstd", "--directory", str(tmp_path / "bench")]
    command = [sys.executable, str(SCRIPT), *options, *cases, "--json", str(found)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    results = {record["case"]: record for record in json.loads(found.read_text())["results"]}
    assert {record["tokens"] for record in results.values()} == {256}
    size = {case: record["bytes_per_token"] for case, record in results.items()}
    assert size["fp8"] < size["zstd"] < size["shards"] < size["extract"]
