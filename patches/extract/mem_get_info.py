"""Without an accelerator the memory for the KV cache counts as zero bytes.

Symptom  AssertionError: num_gpu_blocks > 0, in Scheduler() on a machine without a GPU.
Cause    `speculators.utils.util.mem_get_info` of 0.4 answers (0, 0) where there is no accelerator.
Fix      There the generator's name `mem_get_info` answers with the host's available and total
         memory, in bytes.
Remove when the in-process generator of speculators 0.4 is no longer supported.
"""

from collections.abc import Callable
from types import ModuleType

from spec_compat.patching import Patch, without_accelerator

from ._host import host_memory

patch = Patch(
    module="speculators.data_generation.vllm_hidden_states_generator",
    when={"speculators": ">=0.4,<0.5"},
)


patch.probe(without_accelerator)


@patch.replace("mem_get_info")
def mem_get_info(original: Callable[[], tuple[int, int]], module: ModuleType) -> object:
    return host_memory
