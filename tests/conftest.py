"""Fixtures that run a user's script, in its own process, with the real vLLM and speculators."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import kimi, tiny_models

GENERATE = Path(__file__).parent / "live" / "generate.py"

Script = Callable[..., subprocess.CompletedProcess[str]]

# Begun first: a test that outlasts the others ends the whole later if it is begun last.
LONGEST = "test_served.py"


def pytest_configure(config: pytest.Config) -> None:
    """Under xdist each worker has cores of its own.

    The threads of one vLLM wait for each other by spinning; two on the same cores are ten times
    slower than one after the other.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is None:
        return
    number, count = int(worker.removeprefix("gw")), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    cores = sorted(os.sched_getaffinity(0))
    own = cores[number % len(cores) :: count] or cores
    os.sched_setaffinity(0, own)
    os.environ["OMP_NUM_THREADS"] = str(len(own))
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name != LONGEST)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make_tiny_qwen3(tmp_path_factory.mktemp("models") / "tiny-qwen3")


@pytest.fixture(scope="session")
def mini_kimi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kimi.make(tmp_path_factory.mktemp("models") / "mini-kimi")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    from examples.demo import model

    return model.verifier()


def run_script(script: Path, *arguments: object, env: dict[str, str] | None = None) -> str:
    """Run a script of tests/live in a process of its own; returns what it printed."""
    process = subprocess.run(
        [sys.executable, str(script), *map(str, arguments)],
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", **(env or {})},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return process.stdout


def linked_environment(directory: Path, *instead: str) -> Path:
    """A new environment with the packages of this one, and `instead` of spec-compat's.

    uv links the files, so that it costs seconds and next to no disk. Returns its interpreter.
    """

    def uv(*words: str | Path) -> str:
        command = [sys.executable, "-m", "uv", *map(str, words)]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout

    not_from_an_index = ("spec-compat", "spec_compat", "-e ", "vllm==0.0.0")
    uv("venv", "--quiet", "--seed", "--python", sys.executable, directory)
    frozen = uv("pip", "freeze", "--quiet", "--python", sys.executable).splitlines()
    there = [line for line in frozen if not line.startswith(not_from_an_index)]
    python = directory / "bin" / "python"
    uv("pip", "install", "--quiet", "--no-deps", "--python", python, *there)
    if instead:
        uv("pip", "install", "--quiet", "--python", python, *instead)
    return python


@pytest.fixture
def generate(tmp_path: Path) -> Script:
    """Runs tests/live/generate.py: `generate(model, rows, layer_ids=..., env=..., **options)`.

    The process is given back; the states are in its attribute `states`, the path of a .pt file.
    `python` is the interpreter of another environment.
    """

    def run(
        model: Path,
        rows: list[list[int]],
        env: dict[str, str] | None = None,
        python: str | Path = sys.executable,
        **options: Any,
    ) -> subprocess.CompletedProcess[str]:
        request, states = tmp_path / "request.json", tmp_path / "states.pt"
        request.write_text(json.dumps({"model_path": str(model), "rows": rows, **options}))
        process = subprocess.run(
            [str(python), str(GENERATE), str(request), str(states)],
            env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", **(env or {})},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        process.states = states  # type: ignore[attr-defined]
        return process

    return run
