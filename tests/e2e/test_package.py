"""The package as people get it: built, installed beside speculators and vLLM, and used."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.conftest import linked_environment

pytestmark = [pytest.mark.live, pytest.mark.slow]

ROOT = Path(__file__).parents[2]

SCRIPT = """
import sys, spec_compat, torch
from speculators.data_generation.vllm_hidden_states_generator import VllmHiddenStatesGenerator
if __name__ == "__main__":
    rows = VllmHiddenStatesGenerator(sys.argv[1], max_model_len=64).generate([[5, 6, 7], [8, 9]])
    print("states:", [[tuple(layer.shape) for layer in row["hidden_states"]] for row in rows])
"""


def run(*command: object, **options: object) -> str:
    done = subprocess.run(  # type: ignore[call-overload]
        [str(word) for word in command], capture_output=True, text=True, check=False, **options
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return str(done.stdout)


def uv(*words: object) -> str:
    return run(sys.executable, "-m", "uv", *words)


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An sdist, and a wheel that was built from it and not from the checkout."""
    out = tmp_path_factory.mktemp("dist")
    uv("build", "--quiet", "--out-dir", out, ROOT)
    return out


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return linked_environment(tmp_path_factory.mktemp("environment") / "venv")


def installed(python: Path) -> dict[str, str]:
    lines = run(python, "-m", "pip", "list", "--format=freeze").splitlines()
    return dict(line.split("==", 1) for line in lines if "==" in line)


def test_the_wheel_has_every_patch_and_nothing_at_top_level_but_spec_compat(
    distributions: Path,
) -> None:
    (wheel,) = distributions.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0] for name in names} == {
        "spec_compat",
        wheel.name.rsplit("-py3", 1)[0] + ".dist-info",
    }
    shipped = {name for name in names if name.startswith("spec_compat/") and name.endswith(".py")}
    package = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("spec_compat/**/*.py")}
    patches = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("patches/**/*.py")}
    assert shipped == package | {f"spec_compat/{path}" for path in patches}
    assert {"spec_compat/py.typed", "spec_compat/support.toml"} <= set(names)


def test_the_sdist_has_what_a_build_needs(distributions: Path) -> None:
    (sdist,) = distributions.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[-1] for name in archive.getnames()}
    assert {"pyproject.toml", "LICENSE", "README.md", "patches/extract/capture.py"} <= names


def test_beside_speculators_it_moves_nothing_and_extracts(
    distributions: Path, environment: Path, tiny_llama: Path, tmp_path: Path
) -> None:
    before = installed(environment)
    assert before["speculators"] == "0.3.0"
    (wheel,) = distributions.glob("*.whl")
    run(environment, "-m", "pip", "install", "--quiet", wheel)
    after = installed(environment)
    assert "spec-compat" in after.keys() - before.keys()
    assert {name: after.get(name) for name in before} == before

    command = "import spec_compat.patches as p; print(p.__file__)"
    patches = run(environment, "-c", command, cwd=tmp_path)
    assert Path(patches.strip()).is_relative_to(environment.parents[1])
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    printed = run(
        environment,
        script,
        tiny_llama,
        cwd=tmp_path,
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"},
    )
    assert f"states: {[[(3, 64)] * 4, [(2, 64)] * 4]}" in printed
