"""vLLM computes with the model runner for which the states were shown to be right.

Symptom  AttributeError: no attribute 'input_batch', in the worker extension of 0.4. Silent, in that
         of 0.3: rows are cut in the order they were handed in, and the runner had sorted them.
Cause    Since vLLM 0.22.0 a second model runner is the default for ever more models on a GPU. It
         orders a batch by tokens, and keeps the order elsewhere.
Fix      VLLM_USE_V2_MODEL_RUNNER is 0 unless the user has set it, before VllmConfig reads it. With
         1, extract/capture takes the order from where the second runner has it. That was run on
         one H200 with vLLM 0.20.2: the states are right (tests/live/cell.py), and prefill is no
         faster (40,867 tokens a second, 40,880 with the first; docs/benchmarks.md).
Remove when vLLM drops the first runner; until then the releases in which the second is the default
         should be run with it on a GPU.
"""

import os
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

from spec_compat.patching import Patch

patch = Patch(
    module="speculators.data_generation.vllm_hidden_states_generator",
    when={"speculators": ">=0.3,<0.5", "vllm": ">=0.22"},
)


@patch.replace("VllmConfig")
def vllm_config(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    @wraps(original, updated=())
    def build(*args: Any, **kwargs: Any) -> Any:
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
        return original(*args, **kwargs)

    return build
