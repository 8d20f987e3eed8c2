"""The snapshots in tests/contract/snapshots, and the names of vLLM that the patches import."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from packaging.version import Version

ROOT = Path(__file__).resolve().parents[3]
SNAPSHOTS = ROOT / "tests" / "contract" / "snapshots"
PATCHES = ROOT / "patches"


def releases(package: str) -> list[str]:
    """The releases that there are snapshots of, oldest first."""
    found = (file.stem.removeprefix(f"{package}-") for file in SNAPSHOTS.glob(f"{package}-*.json"))
    return sorted(found, key=Version)


@cache
def snapshot(package: str, release: str) -> dict[str, Any]:
    """What `python -m tests.contract.upstream` wrote."""
    content: dict[str, Any] = json.loads((SNAPSHOTS / f"{package}-{release}.json").read_text())
    return content


def imports(files: Iterable[Path]) -> Iterator[tuple[str, str]]:
    """Module and name for each name of vLLM that Python files import, or read out of a module."""
    for file in files:
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
                yield from ((str(node.module), alias.name) for alias in node.names)
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value).startswith("vllm."):
                yield ast.unparse(node.value), node.attr
