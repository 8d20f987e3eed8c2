"""The hash functions are looked for in a module that does not exist yet.

Symptom  ModuleNotFoundError: No module named 'vllm.utils.hashing', at the generator's import.
Cause    In vLLM 0.11.0 they are in `vllm.utils`; the module of their own is first in 0.11.1.
Fix      The module is provided with the function that the generator of 0.4 imports.
Remove when vLLM 0.11.0 is no longer supported.
"""

from types import ModuleType

from spec_compat.patching import Patch

patch = Patch(module="speculators", when={"speculators": ">=0.4,<0.5", "vllm": "<0.11.1"})


@patch.provide_import("vllm.utils.hashing")
def hashing(absent: None, module: ModuleType) -> ModuleType:
    import vllm.utils

    provided = ModuleType("vllm.utils.hashing", "Provided by spec_compat for speculators.")
    vars(provided).update(get_hash_fn_by_name=vllm.utils.get_hash_fn_by_name)
    return provided
