"""A finished run of the whole pipeline on a tiny model, shared by the tests that look at it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import tiny_models

ROWS = 24
OPTIONS = (
    "--seq-length", "96",
    "--batch-size", "2",
    "--draft-vocab-size", "128",
    "--epochs", "2",
    "--lr", "0.001",
    "--total-seq-len", "256",
    "--seed", "5",
)  # fmt: skip

Command = Callable[..., "subprocess.CompletedProcess[str]"]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "spec_compat.cli", *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "COLUMNS": "160"}


@pytest.fixture(scope="session")
def cli() -> Command:
    """Runs `spec-compat ARGUMENTS...` to its end."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command(*arguments),
            env=environment(),
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )

    return run


@pytest.fixture(scope="session")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.write_conversations(tmp_path_factory.mktemp("data") / "talks.jsonl", ROWS)


@pytest.fixture(scope="session")
def given(tiny_llama: Path, conversations: Path) -> list[str]:
    """The options of the run, but for --output."""
    return ["--model", str(tiny_llama), "--data", str(conversations), *OPTIONS]


@pytest.fixture(scope="session")
def finished(
    cli: Command, given: list[str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    """The directory of a finished run, and what the command printed."""
    output = tmp_path_factory.mktemp("runs") / "a finished run"
    done = cli("run-pipeline", *given, "--output", str(output))
    assert done.returncode == 0, done.stderr + done.stdout
    return output, done.stdout
