"""Post-import hooks that also fire on a reload, and never on a half-imported module.

wrapt has such hooks, but importing wrapt 2 takes longer than all of `import spec_compat` may, its
hooks fire once, and they fire at once on a module that is still being imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from importlib.abc import Loader

Hook = Callable[[ModuleType], None]


def watch(name: str, hook: Hook) -> None:
    """Call `hook(module)` each time that the module of this name has been executed to its end.

    The hook must not raise: the import would fail. A module that is in sys.modules by now is left
    to the caller; see `imported`.
    """
    _finder.hooks[name] = hook
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def imported(name: str) -> ModuleType | None:
    """The module, if it is imported to its end; None if it is absent or half-imported."""
    module = sys.modules.get(name)
    initializing = getattr(getattr(module, "__spec__", None), "_initializing", False)
    return None if initializing else module


class _Loader:
    """The real loader and a call after it; the module never gets to see this object."""

    def __init__(self, loader: Loader, hook: Hook) -> None:
        self.loader = loader
        self.hook = hook

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        self.hook(module)


class _Finder:
    """Lets the other finders find a watched module, then puts `_Loader` around its loader."""

    def __init__(self) -> None:
        self.hooks: dict[str, Hook] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.hooks:
            return None
        others = [f for f in sys.meta_path if f is not self and hasattr(f, "find_spec")]
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = cast("Loader", _Loader(spec.loader, self.hooks[fullname]))
        return spec


_finder = _Finder()
