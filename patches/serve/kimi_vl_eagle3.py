"""Kimi-VL gives out the auxiliary hidden states of its language model.

Symptom  RuntimeError: Model does not support EAGLE3 interface but aux_hidden_state_outputs was
         requested, when vLLM loads a head for Kimi-VL; and before that, where the drafter is
         made, AttributeError: 'KimiVLConfig' object has no attribute 'image_token_index'.
Cause    No vLLM that is known implements SupportsEagle3 for this wrapper, though its language model
         is the one inside Kimi-K2.5.
Fix      As for Kimi-K2.5: the wrapper gets that interface's names, which lead to its language
         model, and its config the id under the name that the drafter reads.
Remove when vLLM 0.17 is no longer supported.
"""

from spec_compat.patching import Patch

from ._wrapper import declare

patch = Patch(
    module="vllm.model_executor.models.kimi_vl",
    when={"vllm": ">=0.16,<0.18"},
    scope="worker",
    after=("serve/deepseek-eagle3",),
)
declare(patch, "KimiVLForConditionalGeneration")
