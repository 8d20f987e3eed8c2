"""Kimi-K2.5 gives out the auxiliary hidden states of its language model.

Symptom  RuntimeError: Model does not support EAGLE3 interface but aux_hidden_state_outputs was
         requested, when vLLM loads a head for Kimi-K2.5; and before that, where the drafter is
         made, AttributeError: 'KimiK25Config' object has no attribute 'image_token_index'.
Cause    vLLM implements SupportsEagle3 for the wrapper from 0.18.0 on; its drafter reads the
         placeholder's id under the name that this config has since then.
Fix      The wrapper gets that interface's names, which lead to its language model, and its config
         the id under the name that the drafter reads.
Remove when vLLM 0.17 is no longer supported.
"""

from spec_compat.patching import Patch

from ._wrapper import declare

patch = Patch(
    module="vllm.model_executor.models.kimi_k25",
    when={"vllm": ">=0.16,<0.18"},
    scope="worker",
    after=("serve/deepseek-eagle3",),
)
declare(patch, "KimiK25ForConditionalGeneration")
