"""Runs speculators' EAGLE-3 pipeline on the vLLM release that is installed.

Importing this package arms the patches: each lands when its target module is imported, or at once
where it was imported already. The work is put off until speculators or vLLM is imported, and
neither is imported here.
"""

from __future__ import annotations

__version__ = "0.1.0"

import sys

from spec_compat import hooks, plugin
from spec_compat.patching import Scope
from spec_compat.report import Report

__all__ = ["Report", "__version__", "arm", "report", "require", "undo"]


def arm() -> Report:
    """Watch for the modules of the patches that apply; patch those that are imported already.

    Happens once a process; importing spec_compat sees to it. Raises UserError for a wrong
    environment variable, PatchConflict for a wrong patch file.
    """
    return plugin.arm()


def report() -> Report:
    """A checkpoint: retry what is pending, look whether the rest still stands, and report."""
    plugin.arm()
    from spec_compat.engine import engine

    return engine.report()


def require(*ids: str, stage: str | None = None, scope: Scope | None = None) -> None:
    """Raise RequiredPatchMissing unless the named patches are in place.

    Without ids: the required patches of the stage and scope, except those that are skipped.
    """
    plugin.arm()
    from spec_compat.engine import engine

    engine.require(*ids, stage=stage, scope=scope)


def undo(*ids: str) -> None:
    """Put back what the named patches (all, without ids) replaced, last applied first.

    A patch one of whose names now holds someone else's object stays, in state "foreign".
    """
    plugin.arm()
    from spec_compat.engine import engine

    engine.undo(*ids)


if "speculators" in sys.modules or "vllm" in sys.modules:
    plugin.register()
else:
    hooks.before(("speculators", "vllm"), plugin.register)
