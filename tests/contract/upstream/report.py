"""What a new release of vLLM moves, and which patch file to open."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from spec_compat import registry
from tests.contract.upstream.pair import Pair
from tests.contract.upstream.snapshots import releases, snapshot


def report(new: str, old: str) -> Iterator[str]:
    """What moved between two releases of vLLM, and which patch file to open; a line each."""
    before, after = snapshot("vllm", old), snapshot("vllm", new)
    yield f"vLLM {old} -> {new}"
    yield from _moved(_flat(before), _flat(after))
    for line in releases("speculators"):
        then, now = Pair(line, old), Pair(line, new)
        for patch_id in sorted(then.verdicts.keys() | now.verdicts.keys()):
            said = [_said(pair, patch_id) for pair in (then, now)]
            if said[0] != said[1]:
                yield f"speculators {line}: {_file(patch_id)}: {said[0]} -> {said[1]}"
        for text in now.breaks:
            yield f"speculators {line}: {text}{_adapters(text, line)}"


def _flat(taken: Mapping[str, Any]) -> dict[str, str]:
    """Symbol, or symbol and member, to its signature."""
    flat = dict.fromkeys(taken["facts"], "so")
    for path, entry in taken["symbols"].items():
        flat[path] = entry.get("signature", entry["kind"])
        flat |= {f"{path}.{name}": text for name, text in entry.get("members", {}).items()}
    return flat


def _moved(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[str]:
    for name in sorted(before.keys() | after.keys()):
        if name not in after:
            yield f"  gone     {name}"
        elif name not in before:
            yield f"  new      {name}{after[name] if '(' in after[name] else ''}"
        elif before[name] != after[name]:
            parts = [
                re.findall(r"[*\w]+(?:=[^,]*)?", text.strip("()"))
                for text in (before[name], after[name])
            ]
            less = [f"-{part}" for part in parts[0] if part not in parts[1]]
            more = [f"+{part}" for part in parts[1] if part not in parts[0]]
            yield f"  changed  {name}: {' '.join(less + more) or 'order of parameters'}"


def _said(pair: Pair, patch_id: str) -> str:
    probe = pair.verdicts[patch_id]
    asked = "" if patch_id in pair.nominated else " (not in its range)"
    return probe.verdict.value + (f": {probe.reason}" if probe.reason else "") + asked


def _file(patch_id: str) -> str:
    return f"patches/{patch_id.replace('-', '_')}.py"


def _adapters(text: str, line: str) -> str:
    """The patches that replace the name that a break is about."""
    name = text.split(": ")[1].partition(".")[0]
    found = [
        _file(patch.id)
        for patch in registry.patches()
        if name in patch.factories and Version(line) in SpecifierSet(patch.when["speculators"])
    ]
    return f" [{', '.join(found) or 'no patch replaces ' + name}]"
