"""The tokenizer's Python code runs only where it is trusted.

Symptom  Python code that comes with the verifier runs although it is not trusted.
Cause    `AutoTokenizer.from_pretrained(..., trust_remote_code=True)` in `preprocessing`.
Fix      It gets what SPEC_COMPAT_TRUST_REMOTE_CODE says, and True where it is not set.
Remove when speculators 0.3 and 0.4 are no longer supported.
"""

from types import ModuleType
from typing import Any

from spec_compat.patching import NEEDED, Patch, Probe, asking_for_trust, moved

patch = Patch(
    module="speculators.data_generation.preprocessing",
    when={"speculators": ">=0.3,<0.5"},
    severity="optional",
)


@patch.probe
def needed(module: ModuleType) -> Probe:
    loaders = {name for name in vars(module) if name.startswith("Auto")}
    return NEEDED if loaders == {"AutoTokenizer"} else moved(f"it loads with {sorted(loaders)}")


@patch.replace("AutoTokenizer")
def tokenizer(original: Any, module: ModuleType) -> Any:
    return asking_for_trust(original)
