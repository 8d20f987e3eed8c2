"""Which releases of vLLM serve a verifier with an EAGLE-3 head, as serving.toml has it."""

from __future__ import annotations

from packaging.version import Version

from spec_compat import registry, versions
from spec_compat.patching import Patch
from spec_compat.versions import matches


def serving_problems(
    architectures: list[str], release: Version, on_cpu: bool, sure: bool = False
) -> list[str]:
    """Why this release of vLLM cannot serve such a verifier with EAGLE-3, and which ones can.

    What is known is in serving.toml. A patch that SPEC_COMPAT_ENABLE names counts. An architecture
    that is not there may be served all the same, by a newer release or by way of transformers: with
    `sure` nothing is said of it.
    """
    found = []
    first, patch = _first(architectures), _patch(architectures)
    by_patch = patch and matches(release, patch.when["vllm"]) and patch.id in registry.enabled()
    known = first is not None or patch is not None
    if not (first and release >= first) and not by_patch and (known or not sure):
        found.append(f"this is vLLM {release}; {served_by(architectures)}")
    cpu = versions.table("serving.toml")["cpu"]
    if on_cpu and release < Version(cpu):
        found.append(f"this is vLLM {release}; {cpu} is the first that serves EAGLE-3 on a CPU")
    return found


def served_by(architectures: list[str]) -> str:
    """Which releases of vLLM serve EAGLE-3 for a verifier of these architectures."""
    first, patch, names = _first(architectures), _patch(architectures), ", ".join(architectures)
    said = f"{first} is the first" if first else "no vLLM is known"
    said += f" that serves {names} with EAGLE-3" if first else f" to serve {names} with EAGLE-3"
    if patch:
        said += f"; SPEC_COMPAT_ENABLE={patch.stage} teaches it to {patch.when['vllm']}"
    return said


def _first(architectures: list[str]) -> Version | None:
    known = versions.table("serving.toml")["architectures"].items()
    return next((Version(v) for v, names in known if set(names) & set(architectures)), None)


def _patch(architectures: list[str]) -> Patch | None:
    known = versions.table("serving.toml")["patches"].items()
    return next((registry.get(i) for i, names in known if set(names) & set(architectures)), None)
