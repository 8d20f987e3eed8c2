"""SchedulerConfig must be told `is_encoder_decoder`, and not to schedule asynchronously.

Symptom  ValidationError: 1 validation error for SchedulerConfig, is_encoder_decoder Field required.
         Slow: of 8,192 tokens that a step may have, rows of 50 fill 1,600.
Cause    vLLM made the field a required init variable (vllm-project/vllm#29859, first in 0.12.0);
         `async_scheduling` turns itself on when it is left open (first in 0.14.0), which is made
         for an engine loop that overlaps steps; the generator's loop takes one step at a time.
         The generator allows 32 sequences, a decoder's number; a prefill's cost is its tokens.
Fix      The generator's name `SchedulerConfig` becomes a function that adds the two arguments
         where the installed class knows them and the caller does not give them (0.4 gives one),
         and allows 256 sequences.
Remove when the in-process generator of speculators 0.3 and 0.4 is no longer supported.
"""

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

from spec_compat.patching import NEEDED, Patch, Probe, moved, parameters

patch = Patch(
    module="speculators.data_generation.vllm_hidden_states_generator",
    when={"speculators": ">=0.3,<0.5", "vllm": ">=0.12"},
    upstream="vllm-project/vllm#29859",
)

ARGUMENTS = {"is_encoder_decoder": False, "async_scheduling": False}
SEQUENCES = 256


@patch.probe
def needed(module: ModuleType) -> Probe:
    if "max_num_seqs" in parameters(module.SchedulerConfig):
        return NEEDED
    return moved("SchedulerConfig has no max_num_seqs")


@patch.replace("SchedulerConfig")
def scheduler_config(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    known = {name: ARGUMENTS[name] for name in ARGUMENTS if name in parameters(original)}

    @wraps(original, updated=())
    def build(*args: Any, **kwargs: Any) -> Any:
        sequences = max(SEQUENCES, kwargs.get("max_num_seqs", 0))
        return original(*args, **{**known, **kwargs, "max_num_seqs": sequences})

    return build
