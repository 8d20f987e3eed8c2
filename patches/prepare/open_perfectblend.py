"""The conversations of Open-PerfectBlend are known by a short name, as others are.

Symptom  ValueError: Unsupported dataset: open-perfectblend.
Cause    `DATASET_CONFIGS` has ShareGPT and UltraChat alone.
Fix      In `preprocessing` the name leads to a dictionary with one entry more: that of ShareGPT,
         whose rows have `conversations` as well, for another repository.
Remove when speculators 0.3 and 0.4 are no longer supported.
"""

from copy import copy
from types import ModuleType
from typing import Any

from spec_compat.patching import NEEDED, Patch, Probe, already_fixed

patch = Patch(
    module="speculators.data_generation.preprocessing",
    when={"speculators": ">=0.3,<0.5"},
    severity="optional",
)

NAME, REPOSITORY = "open-perfectblend", "mlabonne/open-perfectblend"


@patch.probe
def needed(module: ModuleType) -> Probe:
    return already_fixed("the name is known") if NAME in module.DATASET_CONFIGS else NEEDED


@patch.replace("DATASET_CONFIGS")
def configs(original: dict[str, Any], module: ModuleType) -> dict[str, Any]:
    config = copy(original["sharegpt"])
    config.name, config.hf_path = NAME, REPOSITORY
    return {**original, NAME: config}
