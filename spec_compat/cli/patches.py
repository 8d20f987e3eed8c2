"""`spec-compat list` and `spec-compat show`."""

from __future__ import annotations

import inspect
import json

from packaging.version import Version
from rich.console import Console
from rich.table import Column, Table

from spec_compat import registry, versions
from spec_compat.patching import Patch
from spec_compat.support import support
from spec_compat.versions import PAIR, matches


def list_all(as_json: bool) -> None:
    """Every patch, and whether it applies to the releases that are installed."""
    environment = versions.detect()
    planned = registry.plan(environment)
    if as_json:
        rows = [
            {
                "id": item.patch.id,
                "stage": item.patch.stage,
                "scope": item.patch.scope,
                "severity": item.patch.severity,
                "target": item.patch.target,
                "when": dict(item.patch.when),
                "applies": item.applies,
                "reason": item.reason,
            }
            for item in planned
        ]
        print(json.dumps(rows, indent=1))
        return
    table = Table(Column("patch", no_wrap=True), "scope", "severity", "applies", "why")
    for item in planned:
        applies = "yes" if item.applies else "no"
        table.add_row(item.patch.id, item.patch.scope, item.patch.severity, applies, item.reason)
    Console().print(table)
    if pair := support().installed(environment):
        print(pair)


def show(patch_id: str) -> None:
    """One patch with the text of its file. Raises UnknownPatch."""
    patch = registry.get(patch_id)
    item = next(i for i in registry.plan(versions.detect()) if i.patch.id == patch.id)
    print(f"{patch.id}\n")
    print(inspect.cleandoc(patch.doc))
    print(f"\ntarget   {patch.target}")
    print(f"when     {', '.join(f'{name} {spec}' for name, spec in patch.when.items())}")
    print(f"releases {_releases(patch)}")
    print(f"scope    {patch.scope}, {patch.severity}")
    if patch.upstream:
        print(f"upstream {patch.upstream}")
    print(f"here     {'applies' if item.applies else 'does not apply'}: {item.reason}")


def _releases(patch: Patch) -> str:
    """The known releases that the patch's specifiers name, oldest and newest of each package."""
    parts = []
    for package in PAIR:
        known = map(Version, support().releases(package))
        named = [v for v in known if matches(v, patch.when.get(package, ""))]
        parts.append(f"{package} {named[0]} to {named[-1]}" if named else f"no {package} known")
    return ", ".join(parts)
