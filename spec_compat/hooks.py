"""wrapt's post-import hooks, made safe, and a trigger that puts off what they cost.

wrapt fires a hook at once, and only once, for a module that is still being imported, and importing
wrapt takes longer than all of `import spec_compat` may; hence the checks here and the trigger.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

Hook = Callable[[ModuleType], None]


def watch(name: str, hook: Hook) -> None:
    """Call `hook(module)` once the module of this name has been executed to its end.

    The hook must not raise: the import would fail. A module that is in sys.modules by now is left
    to the caller; see `imported`.
    """
    from wrapt import register_post_import_hook

    if name not in sys.modules:
        register_post_import_hook(hook, name)


def before(names: tuple[str, ...], action: Callable[[], object]) -> None:
    """Call `action()` once, when the first of these modules is about to be imported."""
    _trigger.actions = dict.fromkeys(names, action)


def disarm() -> None:
    """Forget the action of `before`: what it is for is done, or is done later by the caller.

    Looking for a release asks the finders for its package, and is not to import it.
    """
    _trigger.actions = {}


def imported(name: str) -> ModuleType | None:
    """The module, if it is imported to its end; None if it is absent or half-imported."""
    module = sys.modules.get(name)
    initializing = getattr(getattr(module, "__spec__", None), "_initializing", False)
    return None if initializing else module


class _Trigger:
    """A finder that notices what is looked for, and finds nothing by itself."""

    def __init__(self) -> None:
        self.actions: dict[str, Callable[[], object]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.actions:
            return None
        action, self.actions = self.actions[fullname], {}
        action()
        return find_spec(fullname)  # anew: wrapt's finder may have come, and be passed over


_trigger = _Trigger()
sys.meta_path.insert(0, _trigger)
