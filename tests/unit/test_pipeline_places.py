"""Places that cannot be written, and files of somebody else: one line, exit code 2, no trace."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from spec_compat.pipeline.run import config, manifest, plan
from spec_compat.pipeline.run.layout import Layout
from tests.unit.pipeline_inputs import make_data, make_releases, make_verifier

# Root, but with no more rights to the files of others than anybody has.
POWERS = "-dac_override,-dac_read_search,-fowner"
PLAIN = ["setpriv", f"--bounding-set={POWERS}", f"--inh-caps={POWERS}"]
READ_ONLY = ["unshare", "-m", "sh", "-c", 'mount --bind -o ro "$0" "$0" && exec "$@"']
SOMEBODY = 65534


# A bare container has neither these rights nor mounts of its own; no other way gives a test files
# that belong to somebody else, or a place that root cannot write.
def works(*command: str | Path) -> bool:
    try:
        return not subprocess.run(command, capture_output=True, check=False).returncode
    except FileNotFoundError:
        return False


@pytest.fixture
def root(tmp_path: Path) -> Path:
    if os.getuid() or not works(*PLAIN, "true") or not works(*READ_ONLY, tmp_path, "true"):
        pytest.skip("files are given to others by root alone, on a system with namespaces")
    make_verifier(tmp_path / "model")
    make_data(tmp_path / "d.jsonl")
    make_releases(tmp_path / "site")
    (tmp_path / "place").mkdir()
    return tmp_path


def begun(root: Path) -> Path:
    """A run that has a manifest, and has done nothing."""
    run = root / "place" / "run"
    run.mkdir()
    given = {"model": str(root / "model"), "data": [str(root / "d.jsonl")], "output": run}
    manifest.begin(plan.make(config.load(given))).save(Layout(run))
    return run


def give_away(path: Path, mode: int) -> None:
    for file in (path, *path.rglob("*")):
        os.chown(file, SOMEBODY, SOMEBODY)
    path.chmod(mode)


def refusal(root: Path, *prefix: str | Path) -> str:
    """The one line that the command ends with."""
    run = root / "place" / "run"
    words = ["--model", root / "model", "--data", root / "d.jsonl", "--output", run]
    before = sorted(root.rglob("*"))
    done = subprocess.run(
        [*prefix, sys.executable, "-m", "spec_compat.cli", "run-pipeline", *words],
        env={**os.environ, "PYTHONPATH": str(root / "site"), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert sorted(root.rglob("*")) == before
    assert len(done.stderr.splitlines()) == 1, done.stderr
    (line,) = done.stderr.splitlines()
    return line


def test_a_directory_of_somebody_else(root: Path) -> None:
    give_away(root / "place", 0o755)
    line = refusal(root, *PLAIN)
    assert line == f"error: --output {root}/place/run: {root}/place cannot be written"


def test_a_run_of_somebody_else(root: Path) -> None:
    give_away(begun(root), 0o755)
    assert f"{root}/place/run/.lock: permission denied" in refusal(root, *PLAIN)


def test_a_run_that_may_not_even_be_looked_at(root: Path) -> None:
    give_away(begun(root), 0o700)
    line = refusal(root, *PLAIN)
    assert "permission denied" in line
    assert f"{root}/place/run" in line


def test_data_of_somebody_else(root: Path) -> None:
    give_away(root / "d.jsonl", 0o600)
    assert f"{root}/d.jsonl: permission denied" in refusal(root, *PLAIN).lower()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer_config.json"])
def test_a_model_of_somebody_else(name: str, root: Path) -> None:
    give_away(root / "model" / name, 0o600)
    line = refusal(root, *PLAIN)
    assert f"{root}/model/{name}" in line
    assert "permission denied" in line.lower()


def test_a_file_system_that_is_read_only(root: Path) -> None:
    line = refusal(root, *READ_ONLY, root / "place")
    assert line == f"error: --output {root}/place/run: {root}/place cannot be written"


def test_a_run_on_a_file_system_that_is_read_only(root: Path) -> None:
    begun(root)
    line = refusal(root, *READ_ONLY, root / "place")
    assert f"{root}/place/run/.lock: read-only file system" in line
