"""Checkpoints are loaded to "cuda:0", whatever the trainer runs on.

Symptom  RuntimeError: Attempting to deserialize object on a CUDA device, when a run is resumed on a
         machine without an accelerator.
Cause    `SingleGPUCheckpointer` names the device in its calls.
Fix      Without an accelerator both loaders read to the CPU.
Remove when speculators 0.3 and 0.4 are no longer supported.
"""

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

from spec_compat.patching import Patch, overlay, without_accelerator

patch = Patch(module="speculators.train.checkpointer", when={"speculators": ">=0.3,<0.5"})


patch.probe(without_accelerator)


@patch.replace("load_safetensors_state_dict")
def load_safetensors(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    @wraps(original)
    def load_safetensors_state_dict(path: Any, device: str) -> Any:
        return original(path, "cpu")

    return load_safetensors_state_dict


@patch.replace("torch")
def torch(original: ModuleType, module: ModuleType) -> ModuleType:
    @wraps(original.load)
    def load(*args: Any, **kwargs: Any) -> Any:
        return original.load(*args, **{**kwargs, "map_location": "cpu"})

    return overlay(original, load=load)
