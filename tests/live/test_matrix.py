"""An old and a new release of vLLM, each in an environment of its own; `make matrix` runs them all.

The old one has the torch of the main environment, the new one that of .venv-serve.
"""

import sys
from pathlib import Path

import pytest
from packaging.version import Version

from scripts import matrix
from tests.tiny_models import write_conversations

pytestmark = [pytest.mark.live, pytest.mark.slow]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    directory = tmp_path_factory.mktemp("oracles")
    write_conversations(directory / "talks.jsonl", matrix.CONVERSATIONS)
    return matrix.oracles(directory, ["tiny-llama"])


# The wheel of vLLM 0.32.0 asks for Python 3.11 or newer, this project for 3.10.
NEEDS_311 = pytest.mark.skipif(sys.version_info < (3, 11), reason="no such wheel for Python 3.10")
PAIRS = [("0.15.1", "0.3.0"), pytest.param("0.32.0", "0.4.0.1", marks=NEEDS_311)]


@pytest.mark.parametrize(("vllm", "speculators"), PAIRS)
def test_300_rows_equal_transformers(
    vllm: str, speculators: str, models: list[Path], tmp_path: Path
) -> None:
    for cell in matrix.cells(vllm, [speculators], tmp_path):
        found, faults = matrix.patched(cell, models)
        assert faults == []
        assert found["models"]["tiny-llama"]["rows"] == 300
        if Version(found["transformers"]) >= Version("5"):
            assert matrix.head(cell, models[0].parent)["loss_0"] < 0.006  # of 0.05


def test_a_run_that_is_wrong_does_not_pass() -> None:
    right = {"rows": 300, "wrong": 0, "error": 0.01}
    found = {"models": {"tiny-llama": right}, "workers": 1, "leftovers": [], "orders": []}
    assert matrix.wrong(found) == []
    for change in ({"workers": 0}, {"leftovers": ["Request"]}, {"orders": ["not undone"]}):
        assert len(matrix.wrong({**found, **change})) == 1
    for change in ({"wrong": 2}, {"error": 0.5}):
        assert len(matrix.wrong({**found, "models": {"tiny-llama": {**right, **change}}})) == 1
