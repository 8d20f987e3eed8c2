"""The one command for a new release: what moved, which patch file to open, the row for support."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract.upstream import snapshots
from tests.contract.upstream.__main__ import main
from tests.contract.upstream.report import report
from tests.contract.upstream.snapshots import releases

OLD, NEW = releases("vllm")[-1], "0.99.0"
REQUEST = "vllm.v1.request:Request"
LOAD = "vllm.config:LoadConfig"
HASHER = "vllm.v1.core.kv_cache_utils:init_none_hash"
Changed = Callable[[Callable[[dict[str, Any]], None]], None]


@pytest.fixture
def release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Changed]:
    """Makes up a release that is the newest one but for what the argument changes."""
    for file in snapshots.SNAPSHOTS.glob("*.json"):
        if file.stem == f"vllm-{OLD}" or file.stem.startswith("speculators"):
            shutil.copy(file, tmp_path)
    monkeypatch.setattr(snapshots, "SNAPSHOTS", tmp_path)

    def change(alter: Callable[[dict[str, Any]], None]) -> None:
        content = json.loads((tmp_path / f"vllm-{OLD}.json").read_text())
        alter(content)
        (tmp_path / f"vllm-{NEW}.json").write_text(json.dumps(content))

    yield change
    snapshots.snapshot.cache_clear()


def test_a_release_in_which_nothing_moved_is_a_line(release: Changed) -> None:
    release(lambda content: None)
    assert list(report(NEW, OLD)) == [f"vLLM {OLD} -> {NEW}"]


def test_what_moved_is_named_with_the_patch_file_to_open(release: Changed) -> None:
    def alter(content: dict[str, Any]) -> None:
        del content["symbols"][LOAD]
        made = content["symbols"][REQUEST]["members"]
        made["__init__"] = made["__init__"].replace(", arrival_time=None", "")
        content["symbols"][HASHER]["signature"] = "(hash_fn, seed)"

    release(alter)
    said = list(report(NEW, OLD))
    assert f"  gone     {LOAD}" in said
    assert f"  changed  {REQUEST}.__init__: -arrival_time=None" in said
    assert f"  changed  {HASHER}: +seed" in said
    for line in releases("speculators"):
        (request,) = (
            text for text in said if text.startswith(f"speculators {line}:") and " Request" in text
        )
        assert "unexpected keyword argument 'arrival_time'" in request
        assert request.endswith("[patches/extract/request.py]")
        assert f"speculators {line}: import: LoadConfig: not in vllm.config" in "\n".join(said)


def test_a_patch_whose_verdict_changes_is_named(release: Changed) -> None:
    def alter(content: dict[str, Any]) -> None:
        made = content["symbols"][REQUEST]["members"]
        made["__init__"] = made["__init__"].replace(")", ", eos_token_id=None)")

    release(alter)
    changed = [text for text in report(NEW, OLD) if "patches/extract/request.py" in text]
    assert len(changed) == len(releases("speculators"))
    assert all("needed -> already fixed" in text for text in changed)


def test_the_report_ends_with_the_row_for_support(
    release: Changed, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    release(lambda content: content["requires"].update(torch="==2.99.0+cpu"))
    monkeypatch.setattr(sys, "argv", ["upstream", "--report", NEW, OLD])
    main()
    printed = capsys.readouterr().out
    assert f'[[vllm]]\nversion = "{NEW}"\n' in printed
    assert 'torch = "2.99.0"' in printed


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--report", NEW, OLD], f"no wheel of vllm {NEW}"),
        (["vllm"], "name a package and its releases, or --report NEW OLD"),
    ],
)
def test_what_is_not_there_is_one_line_and_nothing_is_written(
    arguments: list[str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = sorted(snapshots.SNAPSHOTS.iterdir())
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(sys, "argv", ["upstream", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert says in f"{stopped.value} {capsys.readouterr().err}"
    assert stopped.value.code
    assert sorted(snapshots.SNAPSHOTS.iterdir()) == before
