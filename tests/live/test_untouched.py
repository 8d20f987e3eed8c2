"""vLLM is never modified for extraction: a server beside it must not notice spec_compat."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.live, pytest.mark.slow]


def test_an_extraction_leaves_every_attribute_of_vllm_as_it_was(tiny_llama: Path) -> None:
    script = Path(__file__).with_name("untouched.py")
    process = subprocess.run(
        [sys.executable, str(script), str(tiny_llama)],
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    found = json.loads(next(line for line in process.stdout.splitlines() if line[:1] == "{"))
    assert found["rows"] == 2
    assert found["attributes"] > 1000
    assert found["driver"] == []
    assert found["workers"] == [[]]
