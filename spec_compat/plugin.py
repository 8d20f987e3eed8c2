"""The `vllm.general_plugins` entry point: vLLM calls it in each of its processes."""


def register() -> None:
    """Arm the patches in this process. Logs what is wrong; raises it if SPEC_COMPAT_STRICT is 1.

    `spec_compat.arm()`, `report()` and `require()` raise it in any case.
    """
    from spec_compat.engine import engine, log, strict  # what this needs is not cheap to import

    try:
        engine.arm()
    except Exception as error:
        if strict():
            raise
        log.error("no patch is armed: %s", error)
