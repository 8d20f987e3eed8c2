"""The loss mask goes by the token that the head reads, not by the one that it learns.

Symptom  Silent: what follows the token that ends a turn is trained on, and counted in the accuracy;
         for most templates it is the header of the next turn, which no server ever drafts (150 of
         9,962 positions in 150 answers of SmolLM2, all of them a line feed). The first token of a
         turn is not trained on.
Cause    `shift_batch` moves the mask by one place, as it moves the tokens that are read. Position i
         reads token i + 1 beside the state of token i, and its target, the verifier's choice after
         token i + 1, stands for token i + 2. Upstream has a note to verify this.
Fix      Position i is trained on where token i + 2 is the assistant's. For the last position it is
         not known whose the next token would be: it is left out.
Remove when speculators 0.3 and 0.4 are no longer supported.
"""

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

from spec_compat.patching import NEEDED, Patch, Probe, already_fixed, moved

patch = Patch(module="speculators.train.data", when={"speculators": ">=0.3,<0.5"})


@patch.probe
def needed(module: ModuleType) -> Probe:
    numbers = module.torch.arange(4)
    names = ("input_ids", "verifier_last_hidden_states", "loss_mask", "position_ids", "lengths")
    batch = dict.fromkeys((*names, "hidden_states"), numbers)
    shifted = module.shift_batch(batch)
    read, mask = shifted["input_ids"].tolist(), shifted["loss_mask"].tolist()
    if (read, mask[:2]) == ([1, 2, 3], [2, 3]):
        return already_fixed("the mask goes by the token that is learnt")
    if read != [1, 2, 3] or mask != read:
        return moved(f"of the tokens 0 to 3, {read} are read, under the mask of {mask}")
    return NEEDED


@patch.replace("shift_batch")
def shift(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    @wraps(original)
    def shift_batch(batch: dict[str, Any]) -> dict[str, Any]:
        shifted: dict[str, Any] = original(batch)
        mask = shifted["loss_mask"].roll(-1)
        mask[-1:] = 0
        return {**shifted, "loss_mask": mask}

    return shift_batch
