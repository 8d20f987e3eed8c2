"""The report: what is a problem, what proves that the patches were there, what is written."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spec_compat.report import Outcome, Report, append, role
from tests.unit.world import RUN, World

ENVIRONMENT = {"spec_compat": "0.1.0", "vllm": "0.16.0", "speculators": "0.3.0"}


def outcome(patch_id: str, state: Any, **fields: Any) -> Outcome:
    defaults = {
        "stage": patch_id.split("/")[0],
        "scope": "driver",
        "severity": "required",
        "target": "speculators.gen:f",
        "reason": "",
        "late": False,
        "pid": 1,
        "role": "driver",
        "time": 0.0,
    }
    return Outcome(id=patch_id, state=state, **{**defaults, **fields})


def report(*outcomes: Outcome) -> Report:
    return Report(ENVIRONMENT, outcomes)


@pytest.mark.parametrize(
    ("state", "problem", "there"),
    [
        ("applied", False, True),
        ("not-needed", False, True),
        ("skipped", False, False),
        ("armed", False, False),
        ("undone", False, False),
        ("pending", True, False),
        ("moved", True, False),
        ("foreign", True, False),
        ("failed", True, False),
        ("lost", True, False),
    ],
)
def test_each_state(state: str, problem: bool, there: bool) -> None:
    one = report(outcome("extract/a", state, role="Worker"))
    assert (bool(one.problems()), one.processes_with({"extract/a"}) == (1,)) == (problem, there)
    assert not report(outcome("extract/a", state, severity="optional")).problems()


def test_a_patch_is_asked_for_in_its_scope_and_stage_unless_it_is_skipped() -> None:
    failed = outcome("extract/b", "failed", scope="worker")
    assert failed.is_asked_for()
    assert failed.is_asked_for("worker", "extract")
    assert not failed.is_asked_for("driver")
    assert not failed.is_asked_for(stage="train")
    assert not outcome("extract/b", "skipped").is_asked_for()
    assert not outcome("extract/b", "failed", severity="optional").is_asked_for()


def test_a_worker_that_lacks_a_patch_does_not_count() -> None:
    def worker(patch_id: str, state: str, pid: int) -> Outcome:
        return outcome(patch_id, state, pid=pid, role="VllmWorker")

    found = report(
        outcome("extract/a", "applied", pid=1),
        outcome("extract/b", "applied", pid=1),
        *(worker(patch_id, "applied", 2) for patch_id in ("extract/a", "extract/b", "train/c")),
        *(worker("extract/a", "applied", 3), worker("extract/b", "lost", 3)),
    )
    assert found.processes_with({"extract/a", "extract/b"}) == (2,)
    assert found.processes_with({"extract/a"}) == (2, 3)
    assert found.processes_with({"train/d"}) == ()


def test_processes_of_a_kind_are_kept_once_unless_something_else_differs() -> None:
    loaders = [outcome("a", "applied", pid=n, role=f"Process-{n}", time=n) for n in (1, 2, 3)]
    failed = outcome("a", "failed", pid=4, role="Process-4")
    driver = outcome("a", "applied", pid=5, role="driver")
    assert report(*loaders, failed, driver).distinct() == (loaders[0], failed, driver)


def test_the_summary_is_one_line() -> None:
    assert report(
        outcome("extract/a", "applied"),
        outcome("extract/b", "applied"),
        outcome("extract/c", "not-needed"),
        outcome("extract/d", "moved", severity="optional"),
        outcome("extract/e", "failed"),
    ).summary() == (
        "spec_compat 0.1.0: vLLM 0.16.0, speculators 0.3.0: "
        "2 applied, 1 not needed, 1 moved, 1 problems (driver)"
    )
    assert "vLLM not installed" in Report({"spec_compat": "0.1.0"}, ()).summary()


def test_merge_takes_the_last_word_of_each_process(tmp_path: Path) -> None:
    append(str(tmp_path), ENVIRONMENT, [outcome("extract/a", "armed", pid=7)])
    append(str(tmp_path), ENVIRONMENT, [outcome("extract/a", "applied", pid=7)])
    append(str(tmp_path), {**ENVIRONMENT, "vllm": "0.15.1"}, [outcome("extract/a", "armed", pid=8)])
    merged = Report.merge(tmp_path)
    assert {(o.pid, o.state) for o in merged.outcomes} == {(7, "applied"), (8, "armed")}
    assert merged.environment == {**ENVIRONMENT, "vllm": "0.16.0 | 0.15.1"}


def test_a_line_that_was_cut_short_counts_as_not_written(tmp_path: Path) -> None:
    append(str(tmp_path), ENVIRONMENT, [outcome("extract/a", "armed")])
    (file,) = tmp_path.iterdir()
    whole = file.read_text()
    file.write_text(whole + whole.replace("armed", "applied")[:-10])
    assert [o.state for o in Report.merge(tmp_path).outcomes] == ["armed"]


def test_an_empty_directory_proves_nothing(tmp_path: Path) -> None:
    assert Report.merge(tmp_path).outcomes == ()


def test_a_process_writes_what_happened_in_it(world: World) -> None:
    world.patch()
    world.patch("train/later", RUN.replace("speculators.gen", "speculators.later"))
    pid = world.run(
        "import os, spec_compat, speculators.gen; spec_compat.undo('extract/run')\n"
        "answer(os.getpid())",
        SPEC_COMPAT_REPORT_DIR=str(world.reports),
    )
    states = [
        line.split('"')[7] for line in (world.reports / f"{pid}.jsonl").read_text().split("\n")[:-1]
    ]
    assert states == ["armed", "armed", "applied", "undone"]
    merged = Report.merge(world.reports)
    assert {o.id: o.state for o in merged.outcomes} == {
        "extract/run": "undone",
        "train/later": "armed",
    }
    assert merged.environment["vllm"] == "0.16.0"


def test_arming_by_hand_is_arming_once(world: World) -> None:
    """Looking for vLLM's release is not the import that arming waits for."""
    world.patch()
    world.run("import spec_compat; spec_compat.arm()", SPEC_COMPAT_REPORT_DIR=str(world.reports))
    (file,) = world.reports.iterdir()
    assert len(file.read_text().splitlines()) == 1


def test_undo_before_anything_is_armed_holds(world: World) -> None:
    world.patch()
    code = "import spec_compat; spec_compat.undo()\nimport speculators.gen as gen\n"
    got = world.run(code + "answer([states(), gen.Generator().run()])")
    assert got == [{"extract/run": "undone"}, "original"]


def test_a_report_directory_that_cannot_be_written_is_a_warning(world: World) -> None:
    world.patch()
    got = world.run(
        "import spec_compat, speculators.gen\nanswer(states())",
        SPEC_COMPAT_REPORT_DIR=str(world.site / "script.py"),
    )
    assert got == {"extract/run": "applied"}
    assert "SPEC_COMPAT_REPORT_DIR: cannot write the report" in world.stderr


def test_what_is_logged(world: World) -> None:
    """One summary a process, a warning for each required patch that is not in place."""
    world.patch()
    world.patch("extract/gone", RUN.replace("Generator.run", "gone"))
    world.patch("extract/off", RUN.replace("Generator.run", "Generator.inherited"))
    world.run(
        "import logging\n"
        "logging.basicConfig(level=logging.INFO, format='%(levelname)s %(message)s')\n"
        "import spec_compat, speculators.gen\nspec_compat.arm(); spec_compat.report()",
        SPEC_COMPAT_DISABLE="extract/off",
    )
    assert world.stderr.splitlines() == [
        "WARNING disabled by SPEC_COMPAT_DISABLE: extract/off",
        "INFO spec_compat 0.1.0: vLLM 0.16.0, speculators 0.3.0: "
        "1 skipped, 2 armed, 0 problems (driver)",
        "WARNING extract/gone: moved: speculators.gen has no gone (driver)",
    ]


def test_an_unknown_release_is_a_problem_not_a_guess(world: World) -> None:
    world.patch()
    world.write("vllm/_version.py", "__version__ = version = '0.1.dev1+g5e40263c3.empty'")
    code = "import spec_compat, speculators.gen as gen\nanswer([states(), gen.Generator().run()])"
    world.patch("extract/size", RUN.replace("Generator.run", "Generator.size"))
    states = dict.fromkeys(("extract/run", "extract/size"), "failed")
    assert world.run(code) == [states, "original"]
    (question,) = world.stderr.splitlines()
    assert question.startswith("vllm does not know its release (0.1.dev1+g5e40263c3.empty); set")
    got = world.run(code, SPEC_COMPAT_ASSUME_VLLM="0.16.0")
    assert got == [dict.fromkeys(states, "applied"), "patched original"]
    assert "taken for 0.16.0, as SPEC_COMPAT_ASSUME_VLLM says" in world.stderr


@pytest.mark.parametrize(
    ("vllm", "speculators", "says"),
    [
        ("0.10.2", "0.3.0", "vllm 0.10.2 is older than 0.11.0, the oldest known"),
        ("0.16.0", "0.2.0", "speculators 0.2.0 is older than 0.3.0, the oldest known"),
        ("0.16.0", "0.6.1", "speculators 0.6.1 has no in-process generator; 0.4.0.1 was the last"),
        ("0.99.0", "0.3.0", "vllm 0.99.0 is newer than "),
        ("0.16.0rc2", "0.3.0", "vllm 0.16.0rc2 is no release; it is taken for 0.16.0"),
    ],
)
def test_an_import_says_what_is_odd_of_the_releases(
    world: World, vllm: str, speculators: str, says: str
) -> None:
    world.write("vllm/_version.py", f"__version__ = version = {vllm!r}")
    world.write(
        "speculators-0.3.0.dist-info/METADATA", f"Name: speculators\nVersion: {speculators}\n"
    )
    world.run("import spec_compat, speculators.gen")
    (line,) = world.stderr.splitlines()
    assert line.startswith(says)


@pytest.mark.parametrize(
    ("main", "expected"),
    [
        ("vllm.model_executor.models.registry", "model registry"),
        ("vllm.entrypoints.cli.main", "driver"),
        (None, "driver"),
    ],
)
def test_a_process_that_looks_at_a_models_class_drives_nothing(
    main: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = main and SimpleNamespace(name=main)
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__spec__=spec))
    assert role() == expected
