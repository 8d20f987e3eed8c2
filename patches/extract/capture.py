"""Hidden states are captured by hooks on the decoder layers, belong to requests, and prove it.

Symptom  AttributeError: 'LlamaModel' object has no attribute 'get_input_embeddings', at warm-up.
         ValueError: Model X does not support hidden state extraction, for models that vLLM cannot
         serve EAGLE-3 for, and for every multimodal wrapper. Silent: what a model does outside its
         layers (embedding multipliers, attention scaling) is skipped; layers come back in
         ascending order whatever order was asked for.
Cause    The worker extension replaces the inner model's forward by a copy of Llama's as it was in
         vLLM 0.11.0. `get_input_embeddings` became `embed_input_ids` in 0.11.1
         (vllm-project/vllm#27583).
Fix      The model's own forward runs; forward hooks take each layer's stream. Whether that stream
         is `hidden + residual` or `hidden` alone is measured on the first step: the final norm of
         the last layer's stream must be what the model returned. Tokens are assigned to requests
         in the order in which the model runner has them in its batch. A row goes to its storage
         only if its states are finite and if lm_head(norm(last state)) gives the token that vLLM
         sampled. The engine is spec_compat.capture; nothing is captured but in steps that come
         with an order of its driver.
Remove when the in-process generator of speculators 0.3 and 0.4 is no longer supported.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

from spec_compat.capture.worker import LayerCapture
from spec_compat.patching import Patch

patch = Patch(
    module="speculators.data_generation.custom_worker",
    when={"speculators": ">=0.3,<0.5", "vllm": ">=0.11"},
    scope="worker",
    upstream="vllm-project/speculators#279",
)


@patch.replace("HiddenStatesWorkerExtension._setup_hidden_states_capture")
def setup(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    def _setup_hidden_states_capture(self: Any, layer_ids: list[int]) -> str:
        keep = module.get_tp_group().rank_in_group == 0
        self._capture = LayerCapture(self.model_runner, layer_ids, keep=keep)
        return "extract/capture"

    return _setup_hidden_states_capture
