"""transformers 5 hides a name that pydantic looks for when speculators is imported.

Symptom  PydanticUndefinedAnnotation: name 'torch' is not defined, at `import speculators`.
Cause    speculators makes pydantic models of transformers' configurations, and pydantic looks up
         their annotations in `transformers.configuration_utils`. Since transformers 5 that module
         imports torch for type checkers alone. vLLM takes it since 0.19.1, and asks for it since
         0.24.0.
Fix      The module gets the name `torch`, which it has itself under TYPE_CHECKING.
Remove when speculators 0.3 and 0.4 are no longer supported.
"""

from types import ModuleType

from spec_compat.patching import NEEDED, Patch, Probe, already_fixed

patch = Patch(
    module="transformers.configuration_utils",
    when={"speculators": ">=0.3,<0.5", "transformers": ">=5"},
)


@patch.probe
def needed(module: ModuleType) -> Probe:
    return already_fixed("the name is there") if hasattr(module, "torch") else NEEDED


@patch.provide("torch")
def torch(absent: None, module: ModuleType) -> object:
    import torch

    return torch
