"""Extracts in this process and in vLLM's worker, and prints what of vLLM changed in either.

That is: attributes of its modules and classes, and names of sys.modules that are not its own.
"""

import json
import sys
from types import ModuleType
from typing import Any

MODULES = (
    "vllm.config",
    "vllm.config.speculative",
    "vllm.sampling_params",
    "vllm.v1.core.kv_cache_utils",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.executor.abstract",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.request",
    "vllm.v1.structured_output",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.gpu_input_batch",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.model_executor.models.deepseek_v2",
    "vllm.model_executor.models.interfaces",
    "vllm.model_executor.models.kimi_k25",
    "vllm.model_executor.models.kimi_vl",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.layers.layernorm",
)


def attributes() -> dict[str, Any]:
    """Every attribute of vLLM's modules, and of the classes that these define.

    A LazyLoader of vLLM's replaces itself by the module it stands for, with or without us.
    """
    import importlib

    found: dict[str, Any] = {}
    for name in MODULES:
        module: ModuleType = importlib.import_module(name)
        values = vars(module).items()
        for attr, value in [(k, v) for k, v in values if type(v).__name__ != "LazyLoader"]:
            found[f"{name}:{attr}"] = value
            if isinstance(value, type) and value.__module__ == name:
                for inner, raw in list(vars(value).items()):
                    found[f"{name}:{attr}.{inner}"] = raw
    return found


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    ours = [
        key
        for key, value in after.items()
        if str(getattr(value, "__module__", "")).startswith(("spec_compat", "speculators"))
    ]
    other = [key for key, value in before.items() if after.get(key) is not value]
    return sorted({*ours, *other})


def changed_in_worker(worker: Any) -> list[str]:
    now = attributes()
    return changed(now, now)


def made_up() -> list[str]:
    """The names under `vllm.` in sys.modules behind which there is no file or folder of vLLM's."""
    home = tuple(sys.modules["vllm"].__path__)
    found = []
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        folders = list(getattr(spec, "submodule_search_locations", None) or ())
        places = [getattr(spec, "origin", None) or "", *folders]
        if name.startswith("vllm.") and not any(place.startswith(home) for place in places):
            found.append(name)
    return sorted(found)


def declared() -> list[str]:
    """The names under `vllm.` that the patches which are in place here make importable."""
    import spec_compat
    from spec_compat import registry

    applied = {o.id for o in spec_compat.report().outcomes if o.state == "applied"}
    patches = [patch for patch in registry.patches() if patch.id in applied]
    names = {name for patch in patches for name in patch.importable}
    return sorted(name for name in names if name.startswith("vllm."))


def names_in_worker(worker: Any) -> list[list[str]]:
    return [made_up(), declared()]


def main(model: str) -> None:
    before = attributes()
    import spec_compat  # noqa: F401
    from speculators.data_generation.vllm_hidden_states_generator import VllmHiddenStatesGenerator

    generator = VllmHiddenStatesGenerator(model, layer_ids=[2, 4, 5, 7], max_model_len=512)
    rows = generator.generate([list(range(3, 90)), list(range(3, 40))])
    in_worker = generator.executor.collective_rpc(changed_in_worker)
    named = generator.executor.collective_rpc(names_in_worker)
    after = attributes()
    print(
        json.dumps(
            {
                "rows": len(rows),
                "attributes": len(after),
                "driver": changed(before, after),
                "workers": in_worker,
                "made_up": [made_up(), *(found for found, _ in named)],
                "declared": [declared(), *(said for _, said in named)],
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
