"""Nothing that a user is handed can run code: no pickle, and torch.load reads weights only."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted([*(ROOT / "spec_compat").rglob("*.py"), *(ROOT / "patches").rglob("*.py")])


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: str(file.relative_to(ROOT)))
def test_no_source_reads_a_pickle(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            assert not {alias.name for alias in node.names} & {"pickle", "cloudpickle", "dill"}
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            given = {word.arg: ast.unparse(word.value) for word in node.keywords}
            assert given.get("weights_only") == "True", ast.unparse(node)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("np.load", "numpy.load"):
            assert "allow_pickle" not in {word.arg for word in node.keywords}
