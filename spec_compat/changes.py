"""The changes of a patch: made before the first is set, set together or not at all, put back.

What was replaced is written down in a Change alone: classes carry no mark of ours.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from spec_compat.errors import TargetMoved
from spec_compat.patching import Factory, Patch

ABSENT = object()


class _Loaded:
    """The loaded modules as attributes: an owner of names like any other."""


LOADED = _Loaded()
LOADED.__dict__ = sys.modules
_PICKLED_BY_NAME = (FunctionType, BuiltinFunctionType, MethodType, type, staticmethod, classmethod)


@dataclass(frozen=True)
class Change:
    """One replaced name: what its owner's `__dict__` held, and what stands there now."""

    owner: Any
    attr: str
    had_own: bool
    original: Any
    replacement: Any
    qualname: str


def locate(module: ModuleType, qualname: str) -> tuple[Any, str, Any]:
    """Owner (module or class), attribute and raw object of a qualname. Raises TargetMoved."""
    *path, attr = qualname.split(".")
    owner: Any = module
    for part in path:
        owner = vars(owner).get(part)
        if not isinstance(owner, type):
            raise TargetMoved(f"{module.__name__} has no class {part} for {qualname}")
    layers = owner.__mro__ if isinstance(owner, type) else (owner,)
    raw = next((vars(layer)[attr] for layer in layers if attr in vars(layer)), ABSENT)
    if raw is ABSENT:
        raise TargetMoved(f"{module.__name__} has no {qualname}")
    return owner, attr, raw


def vacancy(module: ModuleType, name: str) -> tuple[Any, str, Any]:
    """Owner and attribute of a name that does not exist yet. Raises TargetMoved when it does."""
    first, _, attr = name.partition(".")
    owner: Any = vars(module).get(first) if attr else module
    if attr and not isinstance(owner, type):
        raise TargetMoved(f"{module.__name__} has no class {first} for {name}")
    attr = attr or name
    layers = owner.__mro__ if isinstance(owner, type) else (owner,)
    if any(attr in vars(layer) for layer in layers):
        raise TargetMoved(f"{name} exists")
    return owner, attr, ABSENT


def unimportable(name: str) -> tuple[Any, str, Any]:
    """The place in sys.modules of a name that cannot be imported yet. Raises TargetMoved."""
    home, _, last = name.rpartition(".")
    try:
        above = import_module(home)
    except ImportError as error:
        raise TargetMoved(f"{name}: {error}") from None
    below = hasattr(above, "__path__") and find_spec(name)
    if name in sys.modules or last in vars(above) or below:
        raise TargetMoved(f"{name} exists")
    return LOADED, name, ABSENT


def _place(patch: Patch, module: ModuleType, qualname: str) -> tuple[Any, str, Any]:
    if qualname in patch.importable:
        return unimportable(qualname)
    return (vacancy if qualname in patch.provided else locate)(module, qualname)


def prepare(patch: Patch, module: ModuleType) -> list[Change]:
    """All changes of a patch, with nothing set yet.

    Raises TargetMoved when a name does not exist, TypeError for what must not be replaced.
    """
    places = {qualname: _place(patch, module, qualname) for qualname in patch.factories}
    changes = []
    for qualname, (owner, attr, original) in places.items():
        if original is ABSENT:
            made = patch.factories[qualname](None, module)
            changes.append(Change(owner, attr, False, original, made, qualname))
            continue
        home = owner.__module__ if isinstance(owner, type) else owner.__name__
        if home.partition(".")[0] != patch.module.partition(".")[0]:
            raise TypeError(f"{qualname} belongs to {home}, which {patch.module} only imports")
        made = patch.factories[qualname](original, module)
        if isinstance(original, _PICKLED_BY_NAME) and not issubclass(type(made), _PICKLED_BY_NAME):
            kind = type(made).__name__
            raise TypeError(f"{qualname}: a {kind} does not pickle by name; a plain function does")
        _name(made, patch.factories[qualname], owner, attr)
        changes.append(Change(owner, attr, attr in vars(owner), original, made, qualname))
    return changes


def _name(made: Any, factory: Factory, owner: Any, attr: str) -> None:
    """Name what a patch file defines after the place where it stands, so that pickle finds it."""
    made = made.__func__ if isinstance(made, (staticmethod, classmethod)) else made
    # functools.wraps has overwritten a function's __module__, but not its globals
    defined_in = getattr(made, "__globals__", {}).get("__name__", getattr(made, "__module__", ""))
    if defined_in == factory.__module__ and isinstance(made, (FunctionType, type)):
        inside = isinstance(owner, type)
        made.__module__ = owner.__module__ if inside else owner.__name__
        made.__qualname__ = f"{owner.__qualname__}.{attr}" if inside else attr
        made.__name__ = attr


def commit(changes: list[Change]) -> None:
    """Set all changes or none: an error puts back those already set."""
    for number, change in enumerate(changes):
        try:
            setattr(change.owner, change.attr, change.replacement)
        except Exception:
            put_back(changes[:number])
            raise


def put_back(changes: list[Change]) -> None:
    """Restore what was there, last change first; an attribute that was inherited goes away."""
    for change in reversed(changes):
        if change.had_own:
            setattr(change.owner, change.attr, change.original)
        else:
            delattr(change.owner, change.attr)


def rebind(change: Change, old: Any, new: Any) -> int:
    """Give `new` to every module that has `old` by `from ... import`; how many names that were.

    Only for what the patched module defines itself: what it imported belongs to someone else. And
    vLLM's modules are looked through for vLLM's own names alone.
    """
    home, count = change.owner, 0
    defined = (getattr(old, "__module__", ""), getattr(old, "__qualname__", ""))
    if not isinstance(home, ModuleType) or defined != (home.__name__, change.attr):
        return 0
    roots = {"speculators", home.__name__.partition(".")[0]}
    for name, other in list(sys.modules.items()):
        if other is not home and name.partition(".")[0] in roots:
            for attr in [attr for attr, value in vars(other).items() if value is old]:
                setattr(other, attr, new)
                count += 1
    return count
