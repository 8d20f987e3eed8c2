"""The `vllm.general_plugins` entry point: vLLM calls it in each of its processes."""

from __future__ import annotations

import spec_compat
from spec_compat.engine import log, strict


def register() -> None:
    """Arm the patches in this process. Does not raise, unless SPEC_COMPAT_STRICT is 1."""
    try:
        spec_compat.arm()
    except Exception as error:
        if strict():
            raise
        log.error("no patch is armed: %s", error)
