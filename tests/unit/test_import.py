"""What `import spec_compat` costs, and what it leaves alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import spec_compat

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "vllm", "speculators", "transformers", "pydantic", "typer", "rich", "numpy"}


def run(code: str, **env: str) -> str:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SPEC_COMPAT", "PYTHOND"))}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, **env},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_it_imports_nothing_heavy() -> None:
    code = "import sys, spec_compat.plugin; print(*{name.split('.')[0] for name in sys.modules})"
    loaded = set(run(code).split())
    assert "spec_compat" in loaded
    assert loaded.isdisjoint(HEAVY)


def test_it_takes_less_than_50_ms(tmp_path: Path) -> None:
    """The best of several runs, in CPU time, with bytecode compiled as after any installation."""
    code = "from time import process_time as t; s = t(); import spec_compat; print(t() - s)"
    seconds = [float(run(code, PYTHONPYCACHEPREFIX=str(tmp_path))) for _ in range(12)]
    assert min(seconds) < 0.050


def test_it_installs_no_log_handler() -> None:
    code = (
        "import logging, spec_compat; spec_compat.arm()\n"
        "print(logging.root.handlers, logging.getLogger('spec_compat').handlers)"
    )
    assert run(code) == "[] []\n"


def test_the_version_is_the_distribution_s() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    assert f'\nversion = "{spec_compat.__version__}"\n' in project
