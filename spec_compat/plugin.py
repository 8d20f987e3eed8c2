"""How a process arms the patches: by `import spec_compat`, or by vLLM, which loads a plugin.

`register` is the `vllm.general_plugins` entry point: vLLM calls it in each of its processes.
"""

from __future__ import annotations

from spec_compat.report import Report, role


def register() -> None:
    """Arm the patches in this process. Logs what is wrong; raises it if SPEC_COMPAT_STRICT is 1.

    `spec_compat.arm()`, `report()` and `require()` raise it in any case.
    """
    from spec_compat.engine import log, strict  # what this needs is not cheap to import

    try:
        arm()
    except Exception as error:
        if strict():
            raise
        log.error("no patch is armed: %s", error)


def arm() -> Report:
    """Arm the patches in this process; the first time, warn of what is assumed of its releases."""
    from spec_compat.engine import engine, log
    from spec_compat.support import support

    first = engine.releases is None
    report = engine.arm()
    if first and engine.releases and role() == "driver":
        for line in support().doubts(engine.releases):
            log.warning(line)
    return report
