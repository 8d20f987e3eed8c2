"""A function that EAGLE-1 uses has left transformers, and `import speculators` with it.

Symptom  ModuleNotFoundError: No module named 'transformers.modeling_attn_mask_utils', at
         `import speculators`.
Cause    `speculators.models` imports the models of every algorithm; that of EAGLE-1 takes
         `_prepare_4d_causal_attention_mask` from that module, which is in transformers 5.19.0 and
         not in 5.24.0.
Fix      The module is provided with that function.
Remove when speculators 0.3 and 0.4 are no longer supported.
"""

from importlib.util import find_spec
from types import ModuleType
from typing import Any

from spec_compat.patching import NEEDED, Patch, Probe, already_fixed

patch = Patch(
    module="transformers.configuration_utils",
    when={"speculators": ">=0.3,<0.5", "transformers": ">=5"},
)

NAME = "transformers.modeling_attn_mask_utils"


def causal_mask(
    attention_mask: Any,
    input_shape: Any,
    inputs_embeds: Any,
    past_key_values_length: int,
    sliding_window: int | None = None,
) -> Any:
    """What is added to the scores: 0 where a token is seen, else the dtype's lowest number.

    `attention_mask` is [batch, past + tokens], 0 for padding, or None; the result is
    [batch, 1, tokens, past + tokens].
    """
    import torch

    batch, tokens = input_shape
    lowest = torch.finfo(inputs_embeds.dtype).min
    mask = inputs_embeds.new_full((tokens, past_key_values_length + tokens), lowest)
    mask = mask.triu(past_key_values_length + 1)
    if sliding_window is not None:
        old = torch.ones_like(mask).tril(past_key_values_length - sliding_window - 1)
        mask = mask.masked_fill(old.bool(), lowest)
    mask = mask.expand(batch, 1, -1, -1)
    if attention_mask is None:
        return mask
    return mask.masked_fill(attention_mask[:, None, None, :] == 0, lowest)


@patch.probe
def needed(module: ModuleType) -> Probe:
    return already_fixed("the module is there") if find_spec(NAME) else NEEDED


@patch.provide_import(NAME)
def attention_mask(absent: None, module: ModuleType) -> ModuleType:
    provided = ModuleType(NAME, "Provided by spec_compat for speculators.")
    vars(provided).update(_prepare_4d_causal_attention_mask=causal_mask)
    return provided
