"""On a CPU the worker refuses to start without libraries that only make it faster.

Symptom  RuntimeError: libtcmalloc is not found in LD_PRELOAD.
Cause    vLLM 0.18.0 and 0.18.1 want `libtcmalloc` and, on x86, `libiomp` preloaded; before, nothing
         was asked, and since 0.19.0 it is a warning. What is looked at is the variable alone.
Fix      In the worker, which is running by then, the variable names the libraries that it lacks:
         nothing is loaded by it. Someone who preloads them gets their speed as before.
Remove when vLLM 0.18 is no longer supported.
"""

from types import ModuleType

from spec_compat.patching import NEEDED, Patch, Probe, already_fixed

patch = Patch(
    module="speculators.data_generation.custom_worker",
    when={"speculators": ">=0.3,<0.5", "vllm": ">=0.18,<0.19"},
    scope="worker",
)

LIBRARIES = ("libtcmalloc", "libiomp")


def missing() -> list[str]:
    """The libraries that the variable does not name."""
    import os

    return [name for name in LIBRARIES if name not in os.environ.get("LD_PRELOAD", "")]


@patch.probe
def needed(module: ModuleType) -> Probe:
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return already_fixed("not asked for on this platform")
    return NEEDED if missing() else already_fixed("the libraries are preloaded")


@patch.provide("NAMED_IN_LD_PRELOAD")
def preload(absent: None, module: ModuleType) -> list[str]:
    import multiprocessing
    import os

    names = missing() if multiprocessing.parent_process() else []  # ld.so would read it of a parent
    os.environ["LD_PRELOAD"] = " ".join(filter(None, [os.environ.get("LD_PRELOAD"), *names]))
    return names
