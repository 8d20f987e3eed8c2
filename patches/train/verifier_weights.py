"""The verifier's embeddings, norm and lm_head are found under a wrapper, and read only as they are.

Symptom  ValueError: The repository ... contains custom code. AttributeError: 'KimiK25Config' object
         has no attribute 'vocab_size', of a wrapper whose config has it under `text_config`.
         ValueError: None of the requested tensor names were found in the index, for
         `language_model.model.embed_tokens.weight`. Silent: with a quantised lm_head, which has no
         `lm_head.weight`, the embeddings are taken for it.
Cause    0.3 reads the outer config without `trust_remote_code` and asks for the names of a plain
         decoder; 0.4 unwraps the config, and takes the first name that ends alike.
Fix      `AutoConfig` gives the language model's config, in transformers' own class where it has
         one; `load_model_layers` finds each tensor beside the embeddings of the decoder, and
         refuses one that is not in a floating-point format of its own.
Remove when speculators 0.3 and 0.4 are no longer supported.
"""

import json
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

from spec_compat.patching import NEEDED, Patch, Probe, moved, parameters

from ._verifier import language_config, named

patch = Patch(
    module="speculators.models.eagle3.core",
    when={"speculators": ">=0.3,<0.5"},
    upstream="vllm-project/speculators#963",
)

PLAIN = ("torch.bfloat16", "torch.float16", "torch.float32")


# What `tensor_names` takes from the module of load_model_layers.
LOADING = ("_resolve_file", "safe_open", "EntryNotFoundError")


@patch.probe
def needed(module: ModuleType) -> Probe:
    load = module.load_model_layers
    if parameters(load) != {"layer_names", "model_path"}:
        return moved(f"load_model_layers takes {sorted(parameters(load))}")
    loading = sys.modules[load.__module__]
    if missing := [name for name in LOADING if not hasattr(loading, name)]:
        return moved(f"{loading.__name__} has no {missing[0]}")
    return NEEDED


@patch.replace("AutoConfig")
def config(original: Any, module: ModuleType) -> Any:
    class LanguageModelConfig(original):  # type: ignore[misc]
        @classmethod
        def from_pretrained(cls, verifier: str) -> Any:
            return language_config(original, verifier)

    return LanguageModelConfig


@patch.replace("load_model_layers")
def load(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    @wraps(original)
    def load_model_layers(layer_names: list[str], model_path: str) -> dict[str, Any]:
        there = tensor_names(sys.modules[original.__module__], model_path)
        written = {wanted: named(wanted, there) for wanted in layer_names}
        for wanted, name in written.items():
            if name is None and (quantised := named_like(wanted, there)):
                raise ValueError(f"{model_path}: {quantised} is quantised, {wanted} is not there")
        found = {wanted: name for wanted, name in written.items() if name}
        tensors = original(sorted(set(found.values())), model_path) if found else {}
        for name, tensor in tensors.items():
            if str(tensor.dtype) not in PLAIN:
                raise ValueError(f"{model_path}: {name} is {tensor.dtype}, which needs a scale")
        return {wanted: tensors[name] for wanted, name in found.items()}

    return load_model_layers


def tensor_names(loading: ModuleType, model_path: str) -> list[str]:
    """The names of all tensors of a checkpoint, local or of the hub."""
    try:
        index = loading._resolve_file(model_path, "model.safetensors.index.json")
    except (FileNotFoundError, loading.EntryNotFoundError):
        single = loading._resolve_file(model_path, "model.safetensors")
        with loading.safe_open(single, framework="pt", device="cpu") as weights:
            return list(weights.keys())
    return list(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"])


def named_like(wanted: str, names: list[str]) -> str | None:
    """A tensor of the wanted module that is there in place of its weight: packed, or its scale."""
    module = wanted.split(".")[-2]
    kinds = (name.rpartition(".")[2] for name in names if name.split(".")[-2:-1] == [module])
    return next((n for kind in kinds if (n := named(f"{module}.{kind}", names))), None)
