"""The record of a run reads the verifier's config as the generator does.

Symptom  Python code that comes with the verifier runs although it is not trusted.
Cause    `AutoConfig.from_pretrained(..., trust_remote_code=True)` in `config_generator`.
Fix      It gets what SPEC_COMPAT_TRUST_REMOTE_CODE says, and True where it is not set.
Remove when speculators 0.3 and 0.4 are no longer supported.
"""

from types import ModuleType
from typing import Any

from spec_compat.patching import Patch, asking_for_trust

patch = Patch(
    module="speculators.data_generation.config_generator",
    when={"speculators": ">=0.3,<0.5"},
    severity="optional",
)


@patch.replace("AutoConfig")
def config(original: Any, module: ModuleType) -> Any:
    return asking_for_trust(original)
