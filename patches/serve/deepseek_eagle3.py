"""DeepSeek-V2 and V3 give out the auxiliary hidden states that an EAGLE-3 head drafts from.

Symptom  RuntimeError: Model does not support EAGLE3 interface but aux_hidden_state_outputs was
         requested, when vLLM loads a head for such a verifier.
Cause    vLLM implements SupportsEagle3 for these models from 0.18.0 on.
Fix      The model class gets that interface's names, and the inner model's forward returns, beside
         its output, what comes into each layer that was asked for: hidden + residual. The layers
         are called here and not watched by hooks, because vLLM compiles this function, and what a
         compiled graph gives out has to be among its results. Without layers to give out, the
         original runs. An id that no layer of this rank has is refused.
Remove when vLLM 0.17 is no longer supported.
"""

from collections.abc import Callable
from functools import wraps
from itertools import islice
from types import ModuleType
from typing import Any

from spec_compat.patching import NEEDED, Patch, Probe, already_fixed, moved, parameters

patch = Patch(
    module="vllm.model_executor.models.deepseek_v2",
    when={"vllm": ">=0.16,<0.18"},
    scope="worker",
    after=("serve/eagle3-config",),
)

FORWARD = {"self", "input_ids", "positions", "intermediate_tensors", "inputs_embeds"}
LAYER = {"self", "positions", "hidden_states", "residual", "llama_4_scaling"}


@patch.probe
def needed(module: ModuleType) -> Probe:
    if hasattr(module.DeepseekV2ForCausalLM, "supports_eagle3"):
        return already_fixed("the model implements SupportsEagle3")
    for name, known in (("DeepseekV2Model", FORWARD), ("DeepseekV2DecoderLayer", LAYER)):
        if parameters(getattr(module, name).forward) != known:
            return moved(f"{name}.forward takes other arguments")
    return NEEDED


@patch.provide("DeepseekV2ForCausalLM.supports_eagle3")
def supports_eagle3(absent: None, module: ModuleType) -> bool:
    return True


@patch.provide("DeepseekV2ForCausalLM.set_aux_hidden_state_layers")
def set_layers(absent: None, module: ModuleType) -> Callable[..., Any]:
    def set_aux_hidden_state_layers(self: Any, layers: tuple[int, ...]) -> None:
        start, end = self.model.start_layer, self.model.end_layer
        if not all(start <= layer_id < end for layer_id in layers):
            raise ValueError(
                f"EAGLE-3 states before layers {layers}: there are {start} to {end - 1}"
            )
        self.model.aux_hidden_state_layers = tuple(layers)

    return set_aux_hidden_state_layers


@patch.provide("DeepseekV2ForCausalLM.get_eagle3_aux_hidden_state_layers")
def get_layers(absent: None, module: ModuleType) -> Callable[..., Any]:
    def get_eagle3_aux_hidden_state_layers(self: Any) -> tuple[int, ...]:
        count = len(self.model.layers)
        return (2, count // 2, count - 3)

    return get_eagle3_aux_hidden_state_layers


@patch.provide("DeepseekV2Model.aux_hidden_state_layers")
def no_layers(absent: None, module: ModuleType) -> tuple[int, ...]:
    return ()


@patch.replace("DeepseekV2Model.forward")
def forward(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    def attention_scaling(config: Any, positions: Any) -> Any:
        asked = getattr(config, "llama_4_scaling", None)
        if asked is None:
            return None
        return module._get_llama_4_scaling(
            original_max_position_embeddings=asked["original_max_position_embeddings"],
            scaling_beta=asked["beta"],
            positions=positions,
        )

    @wraps(original)
    def forward(
        self: Any,
        input_ids: Any,
        positions: Any,
        intermediate_tensors: Any,
        inputs_embeds: Any = None,
    ) -> Any:
        group = module.get_pp_group()
        if not self.aux_hidden_state_layers or not group.is_last_rank:
            return original(self, input_ids, positions, intermediate_tensors, inputs_embeds)
        if group.is_first_rank:
            hidden = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
            residual = None
        else:
            hidden = intermediate_tensors["hidden_states"]
            residual = intermediate_tensors["residual"]
        scaling = attention_scaling(self.config, positions)
        states = []
        layers = islice(self.layers, self.start_layer, self.end_layer)
        for layer_id, layer in enumerate(layers, self.start_layer):
            if layer_id in self.aux_hidden_state_layers:
                states.append(hidden if residual is None else hidden + residual)
            hidden, residual = layer(positions, hidden, residual, scaling)
        hidden, _ = self.norm(hidden, residual)
        return hidden, states

    return forward
