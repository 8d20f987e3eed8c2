"""On a CPU the worker refuses to start without libraries that only make it faster.

Symptom  RuntimeError: libtcmalloc is not found in LD_PRELOAD.
Cause    vLLM 0.18.0 and 0.18.1 want `libtcmalloc` and, on x86, `libiomp` preloaded; before, nothing
         was asked, and since 0.19.0 it is a warning. What is looked at is the variable alone.
Fix      In the worker, which is running by then, the variable names the libraries that it lacks:
         nothing is loaded by it. Someone who preloads them gets their speed as before. This cannot
         be undone: undo takes away the name that is provided, and leaves the variable as it is.
Remove when vLLM 0.18 is no longer supported.
"""

from types import ModuleType

from spec_compat.patching import Patch

patch = Patch(
    module="speculators.data_generation.custom_worker",
    when={"speculators": ">=0.3,<0.5", "vllm": ">=0.18,<0.19"},
    scope="worker",
)

LIBRARIES = ("libtcmalloc", "libiomp")


@patch.provide("NAMED_IN_LD_PRELOAD")
def preload(absent: None, module: ModuleType) -> list[str]:
    import multiprocessing
    import os

    before = os.environ.get("LD_PRELOAD", "")
    names = [name for name in LIBRARIES if name not in before]
    if multiprocessing.parent_process() is None or module.torch.cuda.is_available():
        return []  # ld.so would read it in the workers of this process; a GPU's worker does not ask
    os.environ["LD_PRELOAD"] = " ".join(filter(None, [before, *names]))
    return names
