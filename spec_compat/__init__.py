"""Runs speculators' EAGLE-3 pipeline on the vLLM release that is installed.

Importing this package arms the patches: each lands when its target module is imported, or at once
where it was imported already. Nothing that is patched is imported here.
"""

from __future__ import annotations

__version__ = "0.1.0"

from spec_compat.engine import Engine, log, strict
from spec_compat.report import Report

__all__ = ["Report", "__version__", "arm", "report", "require", "undo"]

_engine = Engine()
arm = _engine.arm
report = _engine.report
require = _engine.require
undo = _engine.undo

try:
    arm()
except Exception as error:
    # The CLI and vLLM's plugin loader must be able to import us; arm() and require() raise again.
    if strict():
        raise
    log.error("no patch is armed: %s", error)
