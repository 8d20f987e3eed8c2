"""The package as people get it: built, installed beside speculators and vLLM, and used."""

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from contextlib import suppress
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

IMPORTS = """
import importlib, pkgutil, spec_compat
for module in pkgutil.walk_packages(spec_compat.__path__, "spec_compat."):
    try:
        module.name.endswith("__main__") or importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        assert not error.name.startswith("spec_compat"), error
"""


def run(*command: object, **options: object) -> str:
    done = subprocess.run(  # type: ignore[call-overload]
        [str(word) for word in command], capture_output=True, text=True, check=False, **options
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return str(done.stdout)


def uv(*words: object) -> str:
    return run(sys.executable, "-m", "uv", *words)


def interpreter(version: str) -> str:
    """A Python of this version, on the path or of pyenv."""
    name = f"python{version}"
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    for found in (name, *map(str, pyenv.glob(f"versions/{version}.*/bin/{name}"))):
        with suppress(OSError):
            if (
                subprocess.run([found, "--version"], capture_output=True, check=False).returncode
                == 0
            ):
                return found
    # One Python is all that the suite may ask of a machine; the others are tried where they are.
    pytest.skip(f"there is no {name} here")


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


@pytest.mark.parametrize("version", ["3.10", "3.12", "3.13"])
def test_it_runs_on_every_python(version: str, distributions: Path, tmp_path: Path) -> None:
    """Without torch, vLLM and speculators, as far as it goes without them."""
    python = tmp_path / "venv" / "bin" / "python"
    (wheel,) = distributions.glob("*.whl")
    uv("venv", "--quiet", "--python", interpreter(version), tmp_path / "venv")
    uv("pip", "install", "--quiet", "--python", python, wheel)
    run(python, "-c", IMPORTS, cwd=tmp_path)
    listed = json.loads(run(python, "-m", "spec_compat.cli", "list", "--json", cwd=tmp_path))
    patches = [file for file in ROOT.glob("patches/*/*.py") if not file.stem.startswith("_")]
    assert len(listed) == len(patches)
    spec_compat = [str(python.with_name("spec-compat"))]
    doctor = subprocess.run([*spec_compat, "doctor"], capture_output=True, text=True, check=False)
    assert doctor.returncode == 1
    for name in ("vllm", "speculators", "torch"):
        assert f"problem: {name} is not installed" in doctor.stdout
    given = ["run-pipeline", "--model", "m", "--data", "d.jsonl", "--output", str(tmp_path / "run")]
    refused = subprocess.run([*spec_compat, *given], capture_output=True, text=True, check=False)
    assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1), refused.stderr


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
