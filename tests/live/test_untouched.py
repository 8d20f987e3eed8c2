"""vLLM is never modified for extraction: a server beside it must not notice spec_compat."""

import json
from pathlib import Path

import pytest

from tests.conftest import run_script

pytestmark = [pytest.mark.live, pytest.mark.slow]


def test_an_extraction_leaves_vllm_as_it_was(tiny_llama: Path) -> None:
    printed = run_script(Path(__file__).with_name("untouched.py"), tiny_llama)
    found = json.loads(next(line for line in printed.splitlines() if line[:1] == "{"))
    assert found["rows"] == 2
    assert found["attributes"] > 1000
    assert found["driver"] == []
    assert found["workers"] == [[]]
    assert found["made_up"] == found["declared"]
