"""A stage is a constant beside its `run(job)`; nothing else knows it by its name."""

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from spec_compat.pipeline.run.stage import Stage
from spec_compat.pipeline.stages import STAGES

ROOT = Path(__file__).parents[2]
HOME = ROOT / "spec_compat" / "pipeline" / "stages"
NAMES = {stage.name for stage in STAGES}


@pytest.mark.parametrize("stage", STAGES, ids=str)
def test_the_module_of_a_stage_has_its_constant_and_runs_it(stage: Stage[Any]) -> None:
    tree = ast.parse((HOME / f"{stage.name}.py").read_text())
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assigned = {t.id for n in tree.body if isinstance(n, ast.Assign) for t in n.targets}  # type: ignore[attr-defined]
    assert "run" in functions
    assert stage.name.upper() in assigned


def test_a_stage_comes_after_those_whose_results_it_reads() -> None:
    for place, stage in enumerate(STAGES):
        assert set(stage.after) <= set(STAGES[:place])


def test_nothing_outside_compares_with_the_name_of_a_stage() -> None:
    """Not as `stage == "extract"`, and not as a table from names to facts about stages."""
    found = []
    for file in (ROOT / "spec_compat").rglob("*.py"):
        if HOME in file.parents:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            parts = [*node.comparators, node.left] if isinstance(node, ast.Compare) else []
            parts += node.keys if isinstance(node, ast.Dict) else []
            named = [p.value for p in parts if isinstance(p, ast.Constant) and p.value in NAMES]
            found += [f"{file.relative_to(ROOT)}:{node.lineno}" for _ in named]
    assert found == []


def test_the_runner_imports_nothing_heavy() -> None:
    heavy = "torch", "vllm", "speculators", "transformers", "datasets"
    asked = f"import sys, spec_compat.cli.run; print([n for n in {heavy} if n in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", asked], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout == "[]\n"
