"""The head is served with the rotary embedding that it was trained with: the verifier's."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

pytestmark = [pytest.mark.live, pytest.mark.slow]

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
MROPE = {"type": "mrope", "mrope_section": [4, 6, 6]}
ROTARY: dict[str, dict[str, Any]] = {
    "default": {"rope_theta": 1e6},
    "linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama 3": {"rope_theta": 5e5, "rope_scaling": LLAMA3},
    "yarn": {"rope_scaling": YARN},
    "yarn of DeepSeek": {"rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    "of images": {"rope_theta": 1e6, "rope_scaling": MROPE},
    "transformers 5": {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
    "transformers 5, by kind of layer": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
    },
}
THETA = {"default": 1e6, "llama 3": 5e5, "of images": 1e6, "transformers 5": 5e5}
THETA["transformers 5, by kind of layer"] = 1e6


# What a run says of the head's layers: as the verifier's.
OPTIONS: Any = SimpleNamespace(
    num_layers=1,
    draft_intermediate_size=None,
    draft_heads=None,
    draft_kv_heads=None,
    draft_head_dim=None,
)


def verifier(**overrides: Any) -> LlamaConfig:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    return LlamaConfig(**heads, hidden_size=64, max_position_embeddings=512, **overrides)


def trained(config: LlamaConfig) -> torch.Tensor:
    """Cosines and sines by position, [positions, head_dim]."""
    count = config.max_position_embeddings
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(count)[None])
    half = config.head_dim // 2
    return torch.cat([cos[0, :, :half], sin[0, :, :half]], dim=-1)


def served(config: LlamaConfig) -> torch.Tensor:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope
    from vllm.transformers_utils.config import patch_rope_parameters

    written = LlamaConfig(**config.to_diff_dict())
    patch_rope_parameters(written)
    with set_current_vllm_config(VllmConfig()):
        rope: Any = get_rope(
            written.head_dim,
            max_position=written.max_position_embeddings,
            rope_parameters=written.rope_parameters,
            dtype=torch.float32,
        )
    return rope.cos_sin_cache[: written.max_position_embeddings]  # type: ignore[no-any-return]


@pytest.mark.parametrize("case", ROTARY)
def test_training_and_vllm_turn_alike(case: str) -> None:
    from spec_compat.pipeline.stages.training import layer_config

    config = layer_config(verifier(**ROTARY[case]), OPTIONS)
    assert config.rope_theta == THETA.get(case, 1e4)
    torch.testing.assert_close(trained(config), served(config), rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("case", ["linear", "llama 3", "yarn"])
def test_a_scaling_is_the_verifiers(case: str) -> None:
    from spec_compat.pipeline.stages.training import layer_config

    config = verifier(**ROTARY[case])
    torch.testing.assert_close(trained(layer_config(config, OPTIONS)), trained(config))


def test_the_layer_is_one_that_vllm_knows_whatever_the_verifiers_is() -> None:
    """vLLM's Llama layer refuses every activation but silu."""
    from spec_compat.pipeline.stages.training import layer_config

    gemma = Gemma2Config(head_dim=32, hidden_activation="gelu_pytorch_tanh")
    config = layer_config(gemma, OPTIONS)
    assert (config.model_type, config.hidden_act, config.num_hidden_layers) == ("llama", "silu", 1)
    assert (config.attention_bias, config.mlp_bias, config.head_dim) == (False, False, 32)
