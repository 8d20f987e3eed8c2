"""The patches: discovered, checked, put in order, and planned for an environment."""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from types import ModuleType

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from spec_compat.errors import PatchConflict, UnknownPatch
from spec_compat.patching import Patch
from spec_compat.versions import SOURCES, Environment, matches

# The packages in which a patch may make a name importable that does not exist.
IMPORTABLE = ("transformers", "vllm")


@dataclass(frozen=True)
class Planned:
    """Whether a patch's specifiers nominate it for an environment, and why.

    `undecided` names the package whose release is unknown, because of which the patch does not
    apply: a problem. It is empty where the decision could be made.
    """

    patch: Patch
    applies: bool
    reason: str
    undecided: str = ""


@cache
def patches() -> tuple[Patch, ...]:
    """All patches, those named in `after` first, then by id.

    Raises PatchConflict for the first file that cannot be accepted.
    """
    return ordered(discover(import_module("spec_compat.patches")))


def get(patch_id: str) -> Patch:
    """The patch of this id; UnknownPatch, with near matches, when there is none."""
    for patch in patches():
        if patch.id == patch_id:
            return patch
    raise UnknownPatch(patch_id, [patch.id for patch in patches()])


def plan(environment: Environment) -> tuple[Planned, ...]:
    """Every patch, in order, with the decision for this environment, SPEC_COMPAT_DISABLE and
    SPEC_COMPAT_ENABLE.

    Raises UnknownPatch when one of them names a patch that does not exist.
    """
    off, on = disabled(), enabled()
    return tuple(_planned(patch, environment, off, on) for patch in patches())


def disabled() -> frozenset[str]:
    """The ids that SPEC_COMPAT_DISABLE turns off: all of them for "1"."""
    known = {patch.id for patch in patches()}
    named = {part.strip() for part in os.environ.get("SPEC_COMPAT_DISABLE", "").split(",")} - {""}
    if named == {"1"}:
        return frozenset(known)
    for patch_id in sorted(named - known):
        raise UnknownPatch(patch_id, known, "SPEC_COMPAT_DISABLE")
    return frozenset(named)


def enabled() -> frozenset[str]:
    """The ids of the opt-in patches that SPEC_COMPAT_ENABLE turns on.

    A stage stands for all of its own, and a patch for those that it comes after as well.
    """
    known = {patch.id: patch for patch in patches() if patch.opt_in}
    named = {part.strip() for part in os.environ.get("SPEC_COMPAT_ENABLE", "").split(",")} - {""}
    for name in sorted(named - known.keys() - {patch.stage for patch in known.values()}):
        raise UnknownPatch(name, known, "SPEC_COMPAT_ENABLE")
    for patch in reversed(known.values()):
        if {patch.id, patch.stage} & named:
            named.update(patch.after)
    return frozenset(named & known.keys() | {p.id for p in known.values() if p.stage in named})


def overrides() -> list[str]:
    """A line for each of SPEC_COMPAT_DISABLE and SPEC_COMPAT_ENABLE that chooses patches."""
    chosen = {
        "disabled by SPEC_COMPAT_DISABLE": disabled(),
        "enabled by SPEC_COMPAT_ENABLE": enabled(),
    }
    return [f"{how}: {', '.join(sorted(ids))}" for how, ids in chosen.items() if ids]


def _planned(
    patch: Patch, environment: Environment, off: frozenset[str], on: frozenset[str]
) -> Planned:
    if patch.id in off:
        return Planned(patch, False, "disabled by SPEC_COMPAT_DISABLE")
    if patch.opt_in and patch.id not in on:
        return Planned(patch, False, f"off unless SPEC_COMPAT_ENABLE={patch.stage}")
    unknown = ""
    for name, specifier in patch.when.items():
        release = environment.releases.get(name)
        if release is None:
            return Planned(patch, False, f"{name} is not installed")
        if release.version is None:
            unknown = name
        elif not matches(release.version, specifier):
            return Planned(patch, False, f"{name} {release.version} is not in {specifier}")
    if unknown:
        reason = f"{unknown} does not know its release ({environment.releases[unknown].raw})"
        return Planned(patch, False, reason, undecided=unknown)
    named = [f"{name} {environment.releases[name]}" for name in patch.when]
    return Planned(patch, True, f"for {', '.join(named)}")


def discover(package: ModuleType, root: str = "") -> Iterator[Patch]:
    """Import every patch file under a package; the id is the file's path in it, with dashes."""
    root = root or package.__name__
    for found in sorted(pkgutil.iter_modules(package.__path__, package.__name__ + ".")):
        path = found.name.removeprefix(root + ".").split(".")
        if path[-1].startswith("_"):
            continue
        module = import_module(found.name)
        if found.ispkg:
            yield from discover(module, root)
        else:
            yield _accept("/".join(path).replace("_", "-"), module)


def _accept(patch_id: str, module: ModuleType) -> Patch:
    mine = [name for name, value in vars(module).items() if isinstance(value, Patch)]
    if mine != ["patch"]:
        raise PatchConflict(f"{patch_id}: a patch file defines one `patch`; found {mine or 'none'}")
    patch: Patch = module.patch
    if patch.id not in ("", patch_id):
        raise PatchConflict(f"{patch_id}: its `patch` is that of {patch.id}")
    patch.id, patch.doc = patch_id, module.__doc__ or ""
    allowed = ["speculators"]
    if patch.stage == "serve":
        allowed.append("vllm")
    if patch.provided | patch.importable == set(patch.factories):
        allowed += ["transformers", "torchvision"]
    if patch.module.partition(".")[0] not in allowed:
        raise PatchConflict(f"{patch_id}: {patch.module} is outside {' and '.join(allowed)}")
    _check_provided(patch)
    if not patch.factories:
        raise PatchConflict(f"{patch_id}: replaces nothing")
    if unknown := sorted(set(patch.when) - set(SOURCES)):
        raise PatchConflict(f"{patch_id}: `when` knows {', '.join(SOURCES)}, not {unknown[0]}")
    try:
        SpecifierSet(",".join(patch.when.values()))
    except InvalidSpecifier as error:
        raise PatchConflict(f"{patch_id}: `when`: {error}") from None
    return patch


def _check_provided(patch: Patch) -> None:
    """Raise PatchConflict for a provided name that is none, or that is of another package."""
    for name in sorted(patch.provided):
        if name.count(".") > 1 or name.partition(".")[0] in IMPORTABLE:
            raise PatchConflict(
                f"{patch.id}: provides {name}, neither a name nor `Class.attr`; provide_import is "
                "for what is imported by a name of its own"
            )
    for name in sorted(patch.importable):
        root, dot, _ = name.partition(".")
        if root not in IMPORTABLE or not dot or not all(map(str.isidentifier, name.split("."))):
            raise PatchConflict(
                f"{patch.id}: provide_import is for dotted names in {', '.join(IMPORTABLE)}, not "
                f"{name}"
            )


def ordered(found: Iterable[Patch]) -> tuple[Patch, ...]:
    """The patches with every `after` honoured, ties by id.

    Raises PatchConflict for an unknown or circular `after`, and for two patches of one name in one
    module that do not say which comes first.
    """
    by_id = {patch.id: patch for patch in found}
    sorter: TopologicalSorter[str] = TopologicalSorter()  # no generic before Python 3.11
    for patch in by_id.values():
        if unknown := sorted(set(patch.after) - set(by_id)):
            raise PatchConflict(f"{patch.id}: `after` names {unknown[0]}, which is no patch")
        sorter.add(patch.id, *patch.after)
    try:
        sorter.prepare()
    except CycleError as error:
        raise PatchConflict(f"`after` goes in a circle: {' -> '.join(error.args[1])}") from None
    order = list[Patch]()
    while sorter.is_active():
        ready = sorted(sorter.get_ready())
        order.extend(by_id[patch_id] for patch_id in ready)
        sorter.done(*ready)
    owners = dict[tuple[str, str], Patch]()
    for patch in order:
        for qualname in patch.factories:
            first = owners.get((patch.module, qualname))
            if first is not None and first.id not in patch.after:
                raise PatchConflict(
                    f"{patch.id} and {first.id} both replace {patch.module}:{qualname}; "
                    "one of them must name the other in `after`"
                )
            owners[patch.module, qualname] = patch
    return tuple(order)
