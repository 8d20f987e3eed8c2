"""The tokenizer's Python code runs only where it is trusted.

Symptom  Python code that comes with the verifier runs although it is not trusted.
Cause    `AutoTokenizer.from_pretrained(..., trust_remote_code=True)` in `preprocessing`.
Fix      It gets what SPEC_COMPAT_TRUST_REMOTE_CODE says, and True where it is not set.
Remove when speculators 0.3 and 0.4 are no longer supported.
"""

from types import ModuleType
from typing import Any

from spec_compat.patching import Patch, asking_for_trust

patch = Patch(
    module="speculators.data_generation.preprocessing",
    when={"speculators": ">=0.3,<0.5"},
    severity="optional",
)


@patch.replace("AutoTokenizer")
def tokenizer(original: Any, module: ModuleType) -> Any:
    return asking_for_trust(original)
