"""Adam's state is rounded to bfloat16 in every checkpoint.

Symptom  A resumed run is not the run that was interrupted: the moments have 8 bits of mantissa, and
         the step counter of a bfloat16 stays at 256 for good, so that bias correction is wrong too.
Cause    `save_checkpoint` and `load_optimizer_state_dict` convert the optimizer's state as they
         convert the weights, with `convert_float_dtype` (speculators pull request 411 for 0.5).
Fix      A state dict of an optimizer keeps its dtypes; one of a model is converted as before.
Remove when speculators 0.3 and 0.4 are no longer supported.
"""

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

from spec_compat.patching import NEEDED, Patch, Probe, already_fixed

patch = Patch(module="speculators.train.checkpointer", when={"speculators": ">=0.3,<0.5"})


@patch.probe
def needed(module: ModuleType) -> Probe:
    state = {"state": {0: {"step": module.torch.tensor(257.0)}}, "param_groups": []}
    converted = module.convert_float_dtype(state, module.torch.bfloat16)
    if converted["state"][0]["step"].dtype == module.torch.float32:
        return already_fixed("the optimizer's state keeps its dtypes")
    return NEEDED


@patch.replace("convert_float_dtype")
def convert(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    @wraps(original)
    def convert_float_dtype(sd: Any, dtype: Any) -> Any:
        if isinstance(sd, dict) and sd.keys() == {"state", "param_groups"}:
            return sd
        return original(sd, dtype)

    return convert_float_dtype
