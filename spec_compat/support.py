"""What is known of each pair of releases, from support.toml: what they ask for, and what was shown.

A pair is supported when a live run of it passed. A patch release that does not differ in anything
that is reached, as its snapshot shows, stands with the release that it does not differ from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from spec_compat.versions import PAIR, Environment, Release, matches, parse, table

Status = Literal["supported", "fails", "static only", "impossible"]
GENERATOR_GONE = Version("0.5")


@dataclass(frozen=True)
class Pair:
    """Two releases together; `why` says how that was shown, or what is missing."""

    speculators: str
    vllm: str
    status: Status
    why: str
    run: Mapping[str, Any] | None = None

    def __str__(self) -> str:
        return f"speculators {self.speculators} with vllm {self.vllm}: {self.status}: {self.why}"


@dataclass(frozen=True)
class Findings:
    """Problems keep the pipeline from running, warnings do not."""

    problems: list[str]
    warnings: list[str]


@dataclass(frozen=True)
class Support:
    """The content of support.toml."""

    speculators: tuple[Mapping[str, Any], ...]
    vllm: tuple[Mapping[str, Any], ...]
    install: tuple[Mapping[str, Any], ...]
    impossible: tuple[Mapping[str, Any], ...]
    run: tuple[Mapping[str, Any], ...]

    def releases(self, package: str) -> tuple[str, ...]:
        """The known releases of a package, oldest first, without those that stand with another."""
        return tuple(row["version"] for row in getattr(self, package))

    def row(self, package: str, version: str) -> Mapping[str, Any]:
        """What is known of a release. Raises StopIteration for an unknown one."""
        return next(row for row in getattr(self, package) if row["version"] == version)

    def known(self, package: str, version: Version) -> str | None:
        """The known release that a release counts as: one of its minor release, or the one before.

        None before the oldest. A release newer than all counts as the newest.
        """
        rows = getattr(self, package)
        for row in rows:
            if version in map(Version, (row["version"], *row.get("same", ()))):
                return str(row["version"])
        releases = [Version(row["version"]) for row in rows]
        minor = [known for known in releases if known.release[:2] == version.release[:2]]
        older = [known for known in minor or releases if known < version]
        return str(older[-1]) if older else str(minor[0]) if minor else None

    def pair(self, speculators: str, vllm: str) -> Pair:
        """What is known of two known releases together."""
        pair = partial(Pair, speculators, vllm)
        for row in self.impossible:
            if row["speculators"] == speculators and row["vllm"] == vllm:
                return pair(status="impossible", why=row["reason"])
        runs = [row for row in self.run if (row["speculators"], row["vllm"]) == (speculators, vllm)]
        if not runs:
            return pair(status="static only", why="its calls bind; it was not run")
        last = max(runs, key=lambda row: str(row["date"]))
        if not last["passed"]:
            return pair(status="fails", why=last["note"], run=last)
        return pair(status="supported", why=f"run on {last['date']}", run=last)

    def counts_as(self, package: str, environment: Environment) -> str | None:
        """The known release that the installed one counts as; None where there is none."""
        release = environment.releases.get(package)
        if release is None or release.version is None:
            return None
        gone = _has_no_generator(package, release.version)
        return None if gone else self.known(package, release.version)

    def installed(self, environment: Environment) -> Pair | None:
        """What is known of the two releases that are installed; None unless both are known."""
        speculators, vllm = (self.counts_as(package, environment) for package in PAIR)
        if not (speculators and vllm):
            return None
        pair, release = self.pair(speculators, vllm), environment.releases["vllm"].version
        if release in [Version(other) for other in self.row("vllm", vllm).get("same", ())]:
            why = f"{pair.why}; {release} does not differ from it in anything that is reached"
            return replace(pair, why=why)
        return pair

    def check(self, environment: Environment) -> Findings:
        """What keeps the installed pair from running, and what is assumed of it; a line each."""
        found = Findings(self.unusable(environment), self.assumptions(environment))
        pair = self.installed(environment)
        if pair and pair.status in ("fails", "impossible"):
            found.problems.append(str(pair))
        elif pair and pair.status == "static only" and not self._is_newer(environment):
            found.warnings.append(str(pair))
        return found

    def unusable(self, environment: Environment, packages: Iterable[str] = PAIR) -> list[str]:
        """A line for each of the packages that counts as no known release."""
        lines = [self._unusable(package, environment) for package in packages]
        return [line for line in lines if line]

    def _unusable(self, package: str, environment: Environment) -> str:
        """Why the installed release counts as none that is known; empty where it does."""
        release = environment.releases.get(package)
        oldest, newest = self.releases(package)[0], self.releases(package)[-1]
        if release is None:
            return f"{package} is not installed; known: {oldest} to {newest}"
        if release.version is None:
            return (
                f"{package} does not know its release ({release.raw}); "
                f"set SPEC_COMPAT_ASSUME_{package.upper()} to the one it was built from or after, "
                f"{oldest} to {newest}"
            )
        if _has_no_generator(package, release.version):
            return (
                f"speculators {release} has no in-process generator; {newest} was the last that "
                f"has one: pip install --no-deps speculators=={newest}"
            )
        if self.known(package, release.version) is None:
            return (
                f"{package} {release} is older than {oldest}, the oldest known; "
                f"install one of {oldest} to {newest}"
            )
        return ""

    def doubts(self, environment: Environment) -> list[str]:
        """A line for each installed package that is no known release, or is taken for another."""
        there = [package for package in PAIR if package in environment.releases]
        return self.unusable(environment, there) + self.assumptions(environment)

    def _is_newer(self, environment: Environment) -> bool:
        """Whether a release is newer than all that are known: what is known is of another pair."""
        found = {package: environment.releases[package].version for package in PAIR}
        return any(v and v > Version(self.releases(package)[-1]) for package, v in found.items())

    def assumptions(self, environment: Environment) -> list[str]:
        """A line for each package whose build is no known release: which one it is taken for."""
        lines = []
        for package in PAIR:
            known = self.counts_as(package, environment)
            newest = self.releases(package)[-1]
            if known:
                release, row = environment.releases[package], self.row(package, known)
                text = release.version and _assumed(release, release.version, row, newest)
                lines += [f"{package} {text}"] if text else []
        return lines

    def install_lines(self, speculators: str, vllm: str, wheel: str = "vllm") -> tuple[str, ...]:
        """The commands that put two known releases beside each other; none for an unknown wheel."""
        for group in self.install:
            fits = (
                matches(Version(vllm), group["vllm"]),
                matches(Version(speculators), group["speculators"]),
            )
            if group["wheel"] == wheel and all(fits):
                row = self.row("vllm", vllm)
                words = {**row, "vllm": vllm, "speculators": speculators}
                words["torchvision"] = _torchvision(row["torch"])
                return tuple(line.format(**words) for line in group["lines"])
        return ()

    def disagreements(self, speculators: str, vllm: str, wheel: str = "vllm") -> list[str]:
        """What the two releases cannot both have, so that pip refuses to install both."""
        ours, row = self.row("speculators", speculators), self.row("vllm", vllm)
        torch = f"=={row['torch_cuda' if wheel == 'vllm' else 'torch']}"
        asked = {"torch": torch, "transformers": row["transformers"]}
        return [
            f"speculators {speculators} asks for {name} {ours[name]}, {wheel} {vllm} for {theirs}"
            for name, theirs in asked.items()
            if not _overlap(ours[name], theirs)
        ]


def _torchvision(torch: str) -> str:
    """The release of torchvision that was built for a release of torch, 2.0 or newer."""
    version = Version(torch)
    return f"0.{version.minor + 15}.{version.micro}"


def _overlap(one: str, other: str) -> bool:
    """Whether a release that one of the two specifiers names satisfies both."""
    both = SpecifierSet(one), SpecifierSet(other)
    named = [Version(clause.version.rstrip(".*")) for found in both for clause in found]
    return any(all(found.contains(version) for found in both) for version in named)


def _has_no_generator(package: str, version: Version) -> bool:
    return package == "speculators" and version >= GENERATOR_GONE


def _assumed(release: Release, version: Version, row: Mapping[str, Any], newest: str) -> str:
    """What is assumed of a build that is no known release; empty for one that is."""
    raw, variable = release.raw, f"SPEC_COMPAT_ASSUME_{release.name.upper()}"
    found = next((text for source, text in release.sources.items() if source != "assumed"), "")
    said = []
    if "assumed" in release.sources and parse(found) != version:
        said.append(f"{found} is taken for {raw}, as {variable} says")
    odd = "is no release" if Version(raw).is_prerelease else ""
    if version > Version(newest):
        odd = f"{odd}, and newer" if odd else "is newer"
        said.append(f"{raw} {odd} than {newest}, the newest known: it runs if every probe agrees")
    elif odd:
        said.append(f"{raw} {odd}; it is taken for {row['version']}; {variable} names another")
    elif version not in map(Version, (row["version"], *row.get("same", ()))):
        said.append(f"{raw} is not known; it is taken for {row['version']}")
    return "; ".join(said)


def support(file: str | Path = "support.toml") -> Support:
    """What this version of spec_compat knows, or what another file says."""
    content = {name: tuple(rows) for name, rows in table(str(file)).items()}
    return Support(**{name: content.get(name, ()) for name in Support.__dataclass_fields__})
