"""The trainer takes its local rank for a device, and rank 0 for the first GPU.

Symptom  RuntimeError or AssertionError from `model.to(0)` on a machine without an accelerator.
Cause    `Trainer` moves the model and every batch to `config.local_rank`.
Fix      Without an accelerator the trainer is given the device "cpu" in place of the rank.
Remove when speculators 0.3 and 0.4 are no longer supported.
"""

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

from spec_compat.patching import Patch, without_accelerator

patch = Patch(module="speculators.train.trainer", when={"speculators": ">=0.3,<0.5"})


patch.probe(without_accelerator)


@patch.replace("Trainer.__init__")
def init(original: Callable[..., None], module: ModuleType) -> Callable[..., None]:
    @wraps(original)
    def init_on_cpu(self: Any, model: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        on_cpu = config._replace(local_rank=module.torch.device("cpu"))
        original(self, model, on_cpu, *args, **kwargs)

    return init_on_cpu
