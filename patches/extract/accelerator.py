"""A build of torch for CUDA names an accelerator on a machine that has none.

Symptom  RuntimeError: Found no NVIDIA driver on your system, at the end of an extraction, from
         `DataGenerationConfig.from_generator`, and when a training run is resumed.
Cause    `speculators.utils.util` of 0.4 asks `torch.accelerator.current_accelerator()`, which tells
         what torch was built for, and takes the answer for a device that is there.
Fix      In that module the question is answered with None where no accelerator is available: the
         answer for which its functions are written.
Remove when speculators 0.4 is no longer supported.
"""

from types import ModuleType
from typing import Any

from spec_compat.patching import Patch, Probe, already_fixed, overlay, without_accelerator

patch = Patch(module="speculators.utils.util", when={"speculators": ">=0.4,<0.5"})


@patch.probe
def needed(module: ModuleType) -> Probe:
    if module.torch.accelerator.current_accelerator() is None:
        return already_fixed("torch was built for CPUs")
    return without_accelerator(module)


@patch.replace("torch")
def torch(original: ModuleType, module: ModuleType) -> ModuleType:
    def current_accelerator() -> Any:
        return None

    accelerator = overlay(original.accelerator, current_accelerator=current_accelerator)
    return overlay(original, accelerator=accelerator)
