"""The draft head's configuration is made by pydantic and by transformers, each in its turn.

Symptom  AttributeError: 'Eagle3SpeculatorConfig' object has no attribute '__pydantic_fields_set__',
         when a draft head is built or loaded.
Cause    transformers 5 turns every configuration class into a dataclass, and gives those that have
         no `__init__` of their own one that sets attributes first of all. speculators' class is a
         pydantic model too, and inherits an `__init__` that lets pydantic begin.
Fix      The inherited `__init__` is put back.
Remove when speculators 0.3 and 0.4 are no longer supported.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

from spec_compat.patching import NEEDED, Patch, Probe, already_fixed

patch = Patch(
    module="speculators.models.eagle3.config",
    when={"speculators": ">=0.3,<0.5", "transformers": ">=5"},
)


@patch.probe
def needed(module: ModuleType) -> Probe:
    if "__init__" not in vars(module.Eagle3SpeculatorConfig):
        return already_fixed("the configuration has no __init__ of its own")
    return NEEDED


@patch.replace("Eagle3SpeculatorConfig.__init__")
def init(original: Callable[..., None], module: ModuleType) -> Callable[..., None]:
    inherited: Callable[..., None] = module.SpeculatorModelConfig.__init__
    return inherited


@patch.replace("Eagle3SpeculatorConfig.validate")
def validate(original: Any, module: ModuleType) -> Any:
    return getattr(module.PretrainedConfig, "validate", original)
