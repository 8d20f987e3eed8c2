"""The size of the KV cache is taken from a CUDA device, even where there is none.

Symptom  RuntimeError or AssertionError from torch.cuda.mem_get_info() on a machine without a GPU.
Cause    The generator asks the driver's device 0 how much memory is free, on every platform.
Fix      Without a CUDA device the generator's name `torch` becomes a view of torch whose
         `cuda.mem_get_info` answers with the host's available and total memory, in bytes.
Remove when speculators 0.3 is no longer supported (for 0.4 see extract/mem-get-info).
"""

from types import ModuleType

from spec_compat.patching import NEEDED, Patch, Probe, already_fixed, overlay

from ._host import host_memory

patch = Patch(
    module="speculators.data_generation.vllm_hidden_states_generator",
    when={"speculators": ">=0.3,<0.4"},
)


@patch.probe
def needed(module: ModuleType) -> Probe:
    if module.torch.cuda.is_available():
        return already_fixed("a CUDA device is present")
    return NEEDED


@patch.replace("torch")
def torch(original: ModuleType, module: ModuleType) -> ModuleType:
    return overlay(original, cuda=overlay(original.cuda, mem_get_info=host_memory))
