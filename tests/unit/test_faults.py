"""The record of faults names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


def test_every_test_in_the_record_of_faults_exists() -> None:
    named = NAMED.findall((ROOT / "docs" / "faults.md").read_text("utf-8"))
    assert len(named) > 50
    for file, test in named:
        content = ast.parse((ROOT / file).read_text("utf-8"))
        functions = {node.name for node in content.body if isinstance(node, ast.FunctionDef)}
        assert not test or test in functions, f"{file}::{test}"


def test_every_row_of_the_record_names_a_test_or_a_reason() -> None:
    lines = (ROOT / "docs" / "faults.md").read_text("utf-8").splitlines()
    rows = [line for line in lines if line.startswith("| ")]
    assert [row for row in rows if not NAMED.search(row)] == ["| fault | here | shown by |"] * 5
