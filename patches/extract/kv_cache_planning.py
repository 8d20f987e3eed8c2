"""The functions that group the layers' KV caches are looked for in the module that they left.

Symptom  ImportError: cannot import name '_get_kv_cache_groups_uniform_spec' from
         'vllm.v1.core.kv_cache_utils', at the generator's import.
Cause    vLLM 0.33.0 moved the planning of the KV cache to `vllm.v1.core.kv_cache_planning`.
Fix      `from module import name` looks for a loaded module of that whole name where the module
         has none such: there the functions are provided, and vLLM's module stays as it is.
Remove when speculators 0.3 and 0.4 are no longer supported.
"""

from importlib import import_module
from types import ModuleType
from typing import Any

from spec_compat.patching import NEEDED, Patch, Probe, already_fixed

patch = Patch(module="speculators", when={"speculators": ">=0.3,<0.5", "vllm": ">=0.33"})

HOME = "vllm.v1.core.kv_cache_utils"


@patch.probe
def needed(module: ModuleType) -> Probe:
    there = vars(import_module(HOME))
    names = (name.rpartition(".")[2] for name in patch.importable)
    return already_fixed("the functions are there") if all(n in there for n in names) else NEEDED


@patch.provide_import(f"{HOME}._get_kv_cache_groups_uniform_spec")
def groups_of_one_spec(absent: None, module: Any) -> Any:
    from vllm.v1.core.kv_cache_planning import _get_kv_cache_groups_uniform_spec

    return _get_kv_cache_groups_uniform_spec


@patch.provide_import(f"{HOME}.get_kv_cache_config_from_groups")
def config_from_groups(absent: None, module: Any) -> Any:
    from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups

    return get_kv_cache_config_from_groups


@patch.provide_import(f"{HOME}.unify_hybrid_kv_cache_specs")
def unify_hybrid_specs(absent: None, module: Any) -> Any:
    from vllm.v1.core.kv_cache_planning import unify_hybrid_kv_cache_specs

    return unify_hybrid_kv_cache_specs


@patch.provide_import(f"{HOME}.get_kv_cache_groups")
def groups(absent: None, module: Any) -> Any:
    from vllm.v1.core.kv_cache_planning import get_kv_cache_groups

    return get_kv_cache_groups
