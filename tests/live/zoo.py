"""Tiny random models of many families, saved the way downloaded ones are.

Each is built by transformers from a config: 8 layers of hidden size 128, bf16 weights, a tokenizer
and, where there is a vision tower, the processor files that vLLM asks for. The towers have as many
layers as the decoders. Sliding windows and attention chunks are shorter than the rows.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.tiny_models import geometry, make_tokenizer, randomise

VOCABULARY = 576  # the tokenizer's 512, and room for the image tokens that processors want
LAYERS = 8
WINDOW = 32
PATCH = 8
SIDE = 32
IMAGE = {"height": SIDE, "width": SIDE}
TEXT = {**geometry({}), "vocab_size": VOCABULARY, "hidden_size": 128, "sliding_window": None}
VISION = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": PATCH,
    "num_channels": 3,
}


@dataclass(frozen=True)
class Member:
    """A family, how its model is built, and what is known about its layers.

    `remote` is the config of a model type that comes with its own code: transformers has no such
    class, `adapt` makes its weights of those of `built_as`, which is saved beside it as `oracle`.
    `tokens` are special tokens by the attribute names that the processor reads; `ids` are the
    config's token ids by the text of the token. `built_as` is the class of transformers where it is
    not named like vLLM's, `inside` names its part of the config, and of the weights; `refusal` is
    what is said where the states cannot be known. A `quiet` last layer adds next to nothing: with
    its stream counted twice, the final norm gives nearly the same.
    """

    family: str
    architecture: str
    config_class: str
    config: dict[str, Any] = field(default_factory=dict)
    ids: dict[str, str] = field(default_factory=dict)
    processor: Callable[[Any], Any] | None = None
    tokens: dict[str, str] = field(default_factory=dict)
    tokenizer_class: str = "PreTrainedTokenizerFast"
    built_as: str = ""
    inside: str = ""
    remote: dict[str, Any] = field(default_factory=dict)
    adapt: Callable[[Any], dict[str, Any]] = lambda model: model.state_dict()
    path: str = "model"
    reading: str = "hidden + residual"
    experts: bool = False
    quiet: bool = False
    refusal: str = ""

    @property
    def oracle(self) -> str:
        """The class of transformers that has the same weights."""
        return self.built_as or self.architecture

    @property
    def directory(self) -> str:
        """The family as a name of a directory."""
        return self.family.lower().replace(",", "").replace(" ", "-")

    def build(self, path: Path, *, seed: int = 0) -> Path:
        """Write the model's directory."""
        import torch
        import transformers

        tokenizer = make_tokenizer(self.tokenizer_class, extra_special_tokens=self.tokens)
        config = getattr(transformers, self.config_class)(**self.config)
        inner = getattr(config, f"{self.inside}_config") if self.inside else config
        for name, token in self.ids.items():
            setattr(inner, name, tokenizer.convert_tokens_to_ids(token))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = getattr(transformers, self.oracle)(inner)
            randomise(model)
        if self.quiet:
            for name, parameter in model.model.layers[-1].named_parameters():
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    parameter.data *= 0.02
        if not self.processor:  # Gemma 3n would be saved under the names of its wrapper
            model._checkpoint_conversion_mapping = {}
        model.bfloat16()
        if self.remote:
            self._write_remote(path, model)
        else:
            prefix = f"{self.inside}." if self.inside else ""
            weights = {prefix + name: tensor for name, tensor in model.state_dict().items()}
            model.save_pretrained(path, state_dict=weights)
            config.architectures, config.dtype = [self.architecture], "bfloat16"
            config.save_pretrained(path)
            named = {
                **json.loads((path / "config.json").read_text()),
                "architectures": [self.architecture],
            }
            (path / "config.json").write_text(json.dumps(named))  # Qwen2.5-VL's name goes astray
        processor = self.processor(tokenizer) if self.processor else tokenizer
        processor.save_pretrained(path)
        # One file for both; transformers writes one over the other.
        names = ("feature_extractor", "image_processor")
        parts = [part for part in (getattr(processor, name, None) for name in names) if part]
        if len(parts) > 1:
            together = {
                k: v for part in parts for k, v in json.loads(part.to_json_string()).items()
            }
            (path / "preprocessor_config.json").write_text(json.dumps(together))
        return path

    def _write_remote(self, path: Path, model: Any) -> None:
        from safetensors.torch import save_file

        weights = {name: tensor.contiguous() for name, tensor in self.adapt(model).items()}
        model.save_pretrained(path / "oracle")
        save_file(weights, path / "model.safetensors", {"format": "pt"})
        (path / "configuration.py").write_text(CONFIGURATION)
        config = {
            **self.remote,
            "architectures": [self.architecture],
            "auto_map": {"AutoConfig": "configuration.Config"},
            "torch_dtype": "bfloat16",
        }
        (path / "config.json").write_text(json.dumps(config))


CONFIGURATION = """\
from transformers import AutoConfig, PretrainedConfig


class Named(dict):
    def __getattr__(self, name):
        if name in self:
            return self[name]
        raise AttributeError(name)


def named(value):
    if isinstance(value, list):
        return [named(item) for item in value]
    return Named({k: named(v) for k, v in value.items()}) if isinstance(value, dict) else value


class Config(PretrainedConfig):
    def __init__(self, **options):
        parts = {k: v for k, v in options.items() if k.endswith("_config") and isinstance(v, dict)}
        rest = {k: named(v) for k, v in options.items() if k not in parts}
        super().__init__(**rest)
        for name, part in parts.items():
            kind = part.pop("model_type", "")
            part = AutoConfig.for_model(kind, **part) if kind else PretrainedConfig(**part)
            setattr(self, name, part)
"""


def text(family: str, architecture: str, config_class: str, **options: Any) -> Member:
    """A family of text models; what is no field of Member goes into the config."""
    fields = {key: options.pop(key) for key in list(options) if key in Member.__annotations__}
    return Member(family, architecture, config_class, config={**TEXT, **options}, **fields)


def coded(
    family: str,
    architecture: str,
    remote: dict[str, Any],
    config_class: str = "LlamaConfig",
    config: dict[str, Any] | None = None,
    **fields: Any,
) -> Member:
    """A family of text models that comes with its own code."""
    remote = {**TEXT, "hidden_act": "silu", "rms_norm_eps": 1e-6, **remote}
    fields = {"built_as": "LlamaForCausalLM", **fields}
    options = {**TEXT, **(config or {})}
    return Member(family, architecture, config_class, config=options, remote=remote, **fields)


def unequal_heads(model: Any) -> dict[str, Any]:
    """Every second layer with half of the KV heads, each of which two heads of `model` share."""
    weights: dict[str, Any] = model.state_dict()
    for layer in model.model.layers[1::2]:
        for projection in (layer.self_attn.k_proj, layer.self_attn.v_proj):
            pairs = projection.weight.data.view(2, 2, 32, 128)
            pairs[:, 1] = pairs[:, 0]
    for layer in range(1, LAYERS, 2):
        for name in (f"model.layers.{layer}.self_attn.{p}_proj.weight" for p in "kv"):
            weights[name] = weights[name].view(2, 2, 32, 128)[:, 0].reshape(64, 128)
    return weights


def looped(model: Any) -> dict[str, Any]:
    """With the norms after attention and MLP, and the gate, that Ouro has beside Llama's."""
    import torch

    weights: dict[str, Any] = model.state_dict()
    for layer in range(LAYERS):
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{name}_2.weight"] = torch.ones(128).bfloat16()
    weights["model.early_exit_gate.weight"] = torch.zeros(1, 128).bfloat16()
    weights["model.early_exit_gate.bias"] = torch.zeros(1).bfloat16()
    return weights


def internvl_chat(model: Any) -> dict[str, Any]:
    """Under the names of InternVL's own code, with a tower."""
    import torch

    wide, mixed = 64, 4 * 64  # four patches become one token
    shapes = {
        "embeddings.class_embedding": (1, 1, wide),
        "embeddings.position_embedding": (1, (SIDE // PATCH) ** 2 + 1, wide),
        "embeddings.patch_embedding.weight": (wide, 3, PATCH, PATCH),
        "embeddings.patch_embedding.bias": (wide,),
    }
    for layer in (f"encoder.layers.{number}" for number in range(LAYERS)):
        for name in ("norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias", "ls1", "ls2"):
            shapes[f"{layer}.{name}"] = (wide,)
        for name, rows in {"attn.qkv": 3 * wide, "attn.proj": wide, "mlp.fc1": wide}.items():
            shapes |= {f"{layer}.{name}.weight": (rows, wide), f"{layer}.{name}.bias": (rows,)}
        shapes |= {f"{layer}.mlp.fc2.weight": (wide, wide), f"{layer}.mlp.fc2.bias": (wide,)}
    shapes = {f"vision_model.{name}": shape for name, shape in shapes.items()}
    shapes |= {"mlp1.0.weight": (mixed,), "mlp1.0.bias": (mixed,)}
    for name, width in (("mlp1.1", mixed), ("mlp1.3", 128)):
        shapes |= {f"{name}.weight": (128, width), f"{name}.bias": (128,)}
    tower = {name: 0.02 * torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    return tower | {f"language_model.{name}": one for name, one in model.state_dict().items()}


def windows(every: int) -> dict[str, Any]:
    """Full attention in each `every`th layer, a sliding window in the others."""
    kinds = ["sliding_attention"] * (every - 1) + ["full_attention"]
    return {"sliding_window": WINDOW, "layer_types": kinds * (LAYERS // every)}


TIED: dict[str, Any] = {"tie_word_embeddings": True}
GEMMA = {**TIED, "query_pre_attn_scalar": 32}
EXPERTS = {
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 128,
}
DEEPSEEK = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 48,
    "qk_rope_head_dim": 16,
    "head_dim": 16,
    "v_head_dim": 64,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 2,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
GRANITE = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.0625,
    "residual_multiplier": 1.5,
    "logits_scaling": 8.0,
}
GEMMA_3N = {
    **GEMMA,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 32,
    "num_kv_shared_layers": 2,
    "laurel_rank": 16,
    "activation_sparsity_pattern": [0.0] * LAYERS,
}

GLM4_MOE = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 2,
    "partial_rotary_factor": 0.5,
}

TEXT_MODELS = (
    text("Llama 3", "LlamaForCausalLM", "LlamaConfig"),
    text("Mistral", "MistralForCausalLM", "MistralConfig", sliding_window=WINDOW),
    text("Qwen2", "Qwen2ForCausalLM", "Qwen2Config"),
    text("Qwen3", "Qwen3ForCausalLM", "Qwen3Config"),
    text("SmolLM3", "SmolLM3ForCausalLM", "SmolLM3Config", reading="hidden"),
    text("GLM-4", "Glm4ForCausalLM", "Glm4Config", partial_rotary_factor=0.5),
    text("GLM-4.5 MoE", "Glm4MoeForCausalLM", "Glm4MoeConfig", experts=True, **GLM4_MOE),
    text(
        "Phi-3.5 MoE",
        "PhiMoEForCausalLM",
        "PhimoeConfig",
        built_as="PhimoeForCausalLM",
        experts=True,
        attention_bias=True,
        lm_head_bias=True,
        reading="hidden",
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    text("StableLM", "StableLmForCausalLM", "StableLmConfig", reading="hidden"),
    text("GPT-NeoX", "GPTNeoXForCausalLM", "GPTNeoXConfig", reading="hidden", path="gpt_neox"),
    text("Cohere", "CohereForCausalLM", "CohereConfig", reading="hidden", quiet=True, **TIED),
    text("Cohere 2", "Cohere2ForCausalLM", "Cohere2Config", reading="hidden", **TIED, **windows(4)),
    text(
        "Gemma 2",
        "Gemma2ForCausalLM",
        "Gemma2Config",
        hidden_act="gelu_pytorch_tanh",
        **GEMMA,
        **windows(2),
    ),
    text("Gemma 3, text", "Gemma3ForCausalLM", "Gemma3TextConfig", **GEMMA, **windows(4)),
    text("Granite", "GraniteForCausalLM", "GraniteConfig", reading="hidden", **GRANITE),
    text(
        "EXAONE 4",
        "Exaone4ForCausalLM",
        "Exaone4Config",
        reading="hidden",
        sliding_window_pattern=4,
        **windows(4),
    ),
    text("OLMo 2", "Olmo2ForCausalLM", "Olmo2Config", reading="hidden"),
    text("Phi-3", "Phi3ForCausalLM", "Phi3Config", original_max_position_embeddings=512),
    text(
        "MiMo",
        "MiMoForCausalLM",
        "Qwen2Config",
        built_as="Qwen2ForCausalLM",
        num_nextn_predict_layers=1,
    ),
    coded(
        "MiniCPM",
        "MiniCPMForCausalLM",
        {"model_type": "minicpm", "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 32},
        "GraniteConfig",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 1.4 / LAYERS**0.5,
            "attention_multiplier": 32**-0.5,
        },
        built_as="GraniteForCausalLM",
        reading="hidden",
    ),
    coded(
        "Nemotron NAS",
        "DeciLMForCausalLM",
        {
            "model_type": "nemotron-nas",
            "block_configs": [
                {
                    "attention": {"no_op": False, "n_heads_in_group": 1 + layer % 2},
                    "ffn": {"no_op": False, "intermediate_size": 128},
                }
                for layer in range(LAYERS)
            ],
        },
        config={"num_key_value_heads": 4},
        adapt=unequal_heads,
    ),
    coded(
        "Solar",
        "SolarForCausalLM",
        {
            "model_type": "solar",
            "bskcn_1": [1],
            "bskcn_2": [2],
            "bskcn_3": [5],
            "bskcn_4": [6],
            "bskcn_tv": [0.9, 0.8],
        },
        refusal="hidden states of SolarForCausalLM cannot be extracted: layer 5 is given",
    ),
    coded(
        "Ouro",
        "OuroForCausalLM",
        {"model_type": "ouro", "total_ut_steps": 2, "max_window_layers": LAYERS},
        refusal="OuroForCausalLM runs layer 2 twice in a step",
        adapt=looped,
    ),
    text("Qwen3-MoE", "Qwen3MoeForCausalLM", "Qwen3MoeConfig", experts=True, **EXPERTS),
    text(
        "GPT-OSS",
        "GptOssForCausalLM",
        "GptOssConfig",
        experts=True,
        rope_scaling=YARN,
        **EXPERTS,
        **windows(2),
    ),
    text("DeepSeek-V3", "DeepseekV3ForCausalLM", "DeepseekV3Config", experts=True, **DEEPSEEK),
    text(
        "Gemma 3n",
        "Gemma3nForCausalLM",
        "Gemma3nTextConfig",
        refusal="hidden states of Gemma3nForCausalLM cannot be extracted",
        **GEMMA_3N,
        **windows(4),
    ),
)


def wrapped(
    family: str,
    architecture: str,
    config_class: str,
    text_class: str,
    vision: dict[str, Any],
    *,
    text: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    **fields: Any,
) -> Member:
    """A family with a language model of `text_class` inside a wrapper with a vision tower."""
    inner = {
        **TEXT,
        "model_type": text_class,
        "architectures": [ARCHITECTURES.get(text_class, "")],
        **(text or {}),
    }
    config = {"text_config": inner, "vision_config": vision, **(options or {})}
    fields = {"path": "language_model.model", **fields}
    return Member(family, architecture, config_class, config=config, **fields)


ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}


def llava(tokenizer: Any) -> Any:
    from transformers import CLIPImageProcessor, LlavaProcessor

    return LlavaProcessor(
        CLIPImageProcessor(size=IMAGE, crop_size=IMAGE),
        tokenizer,
        patch_size=PATCH,
        num_additional_image_tokens=1,
        vision_feature_select_strategy="default",
    )


def gemma3(tokenizer: Any) -> Any:
    from transformers import Gemma3ImageProcessor, Gemma3Processor

    return Gemma3Processor(Gemma3ImageProcessor(size=IMAGE), tokenizer, image_seq_length=4)


def mistral3(tokenizer: Any) -> Any:
    from transformers import PixtralImageProcessor, PixtralProcessor

    images = PixtralImageProcessor(size={"longest_edge": SIDE}, patch_size=PATCH)
    return PixtralProcessor(images, tokenizer, patch_size=PATCH, spatial_merge_size=2)


def internvl(tokenizer: Any) -> Any:
    from transformers import GotOcr2ImageProcessorFast, InternVLProcessor, InternVLVideoProcessor

    images = GotOcr2ImageProcessorFast(size=IMAGE, min_patches=1, max_patches=2)
    videos = InternVLVideoProcessor(size=IMAGE)
    return InternVLProcessor(images, tokenizer, videos, image_seq_length=4)


def llama4(tokenizer: Any) -> Any:
    from transformers import Llama4ImageProcessorFast, Llama4Processor

    images = Llama4ImageProcessorFast(size=IMAGE, max_patches=2)
    return Llama4Processor(images, tokenizer, patch_size=PATCH)


def omni(tokenizer: Any) -> Any:
    from transformers import (
        Qwen2_5OmniProcessor,
        Qwen2VLImageProcessorFast,
        Qwen2VLVideoProcessor,
        WhisperFeatureExtractor,
    )

    shape = {"patch_size": PATCH, "size": {"shortest_edge": 256, "longest_edge": 4096}}
    images, videos = Qwen2VLImageProcessorFast(**shape), Qwen2VLVideoProcessor(**shape)
    sounds = WhisperFeatureExtractor(feature_size=128, chunk_length=2)
    return Qwen2_5OmniProcessor(images, videos, sounds, tokenizer)


def whisper(tokenizer: Any) -> Any:
    from transformers import WhisperFeatureExtractor, WhisperProcessor

    return WhisperProcessor(WhisperFeatureExtractor(), tokenizer)


def with_videos(name: str, images: str, videos: str) -> Callable[[Any], Any]:
    """A processor of the Qwen-VL kind, of three classes of transformers."""

    def build(tokenizer: Any) -> Any:
        import transformers

        pixels = {"min_pixels": 256, "max_pixels": 4096}  # vLLM 0.12 reads these, not the size
        shape = {
            "patch_size": PATCH,
            "size": {"shortest_edge": 256, "longest_edge": 4096},
            **pixels,
        }
        parts = (getattr(transformers, part)(**shape) for part in (images, videos))
        image_processor, video_processor = parts
        return getattr(transformers, name)(image_processor, tokenizer, video_processor)

    return build


QWEN_VISION = {
    "depth": LAYERS,
    "hidden_size": 64,
    "num_heads": 2,
    "intermediate_size": 64,
    "out_hidden_size": 128,
    "patch_size": PATCH,
    "spatial_patch_size": PATCH,
    "in_channels": 3,
    "in_chans": 3,
}
QWEN_VL: dict[str, Any] = {
    "ids": {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    },
    "tokens": {
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "vision_start_token": "<|vision_start|>",
        "vision_end_token": "<|vision_end|>",
    },
    "tokenizer_class": "Qwen2TokenizerFast",
}
OMNI_TOKENS = {
    **{f"{kind}_token": f"<|{kind}_pad|>" for kind in ("image", "audio", "video")},
    **{f"{kind}_{e}os_token": f"<|{kind}_{e}os|>" for kind in ("vision", "audio") for e in "be"},
}
OMNI_AUDIO = {
    "d_model": 64,
    "encoder_layers": LAYERS,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "output_dim": 128,
}
GLM_MARKS = {
    f"{kind}_{edge}_token_id": f"<|{word}_of_{kind}|>"
    for kind in ("image", "video")
    for edge, word in (("start", "begin"), ("end", "end"))
}
LLAMA4_TOKENS = ("image", "image_start", "image_end", "patch", "tile_x_separator")

MULTIMODAL_MODELS = (
    wrapped(
        "LLaVA",
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        "llama",
        {"model_type": "clip_vision_model", **VISION},
        options={"image_seq_length": 16},
        ids={"image_token_index": "<image>"},
        processor=llava,
        tokens={"image_token": "<image>"},
    ),
    wrapped(
        "Gemma 3, multimodal",
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        "gemma3_text",
        {"model_type": "siglip_vision_model", **VISION, "vision_use_head": False},
        text={**GEMMA, **windows(4)},
        options={"mm_tokens_per_image": 4},
        ids={
            "image_token_index": "<image>",
            "boi_token_index": "<boi>",
            "eoi_token_index": "<eoi>",
        },
        processor=gemma3,
        tokens={
            "image_token": "<image>",
            "boi_token": "<boi>",
            "eoi_token": "<eoi>",
            **{f"newlines_{number}": number * "\n" for number in range(1, 5)},
        },
    ),
    wrapped(
        "Mistral 3",
        "Mistral3ForConditionalGeneration",
        "Mistral3Config",
        "mistral",
        {"model_type": "pixtral", **VISION, "head_dim": 32},
        options={"spatial_merge_size": 2},
        ids={"image_token_index": "[IMG]"},
        processor=mistral3,
        tokens={
            "image_token": "[IMG]",
            "image_break_token": "[IMG_BREAK]",
            "image_end_token": "[IMG_END]",
        },
    ),
    wrapped(
        "InternVL",
        "InternVLForConditionalGeneration",
        "InternVLConfig",
        "qwen2",
        {
            "model_type": "internvl_vision",
            **VISION,
            "image_size": [SIDE, SIDE],
            "patch_size": [PATCH, PATCH],
        },
        options={"image_seq_length": 4},
        ids={"image_token_id": "<IMG_CONTEXT>"},
        processor=internvl,
        tokens={
            "context_image_token": "<IMG_CONTEXT>",
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "video_token": "<video>",
        },
    ),
    Member(
        "InternVL, its own code",
        "InternVLChatModel",
        "Qwen2Config",
        TEXT,
        built_as="Qwen2ForCausalLM",
        remote={
            "model_type": "internvl_chat",
            "llm_config": {**TEXT, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
            "vision_config": {
                **VISION,
                "qkv_bias": True,
                "qk_normalization": False,
                "hidden_act": "gelu",
                "norm_type": "layer_norm",
                "layer_norm_eps": 1e-6,
                "initializer_factor": 1.0,
            },
            "force_image_size": SIDE,
            "downsample_ratio": 0.5,
            "ps_version": "v2",
            "select_layer": -1,
            "min_dynamic_patch": 1,
            "max_dynamic_patch": 2,
            "dynamic_image_size": True,
            "use_thumbnail": False,
        },
        adapt=internvl_chat,
        tokens={"context": "<IMG_CONTEXT>", "start": "<img>", "end": "</img>"},
        path="language_model.model",
    ),
    wrapped(
        "Qwen2.5-VL",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen2_5_VLConfig",
        "qwen2_5_vl_text",
        {**QWEN_VISION, "window_size": 32, "fullatt_block_indexes": [7]},
        text={"rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]}},
        processor=with_videos(
            "Qwen2_5_VLProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLVideoProcessor"
        ),
        **QWEN_VL,
    ),
    wrapped(
        "Qwen3-VL",
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLConfig",
        "qwen3_vl_text",
        {**QWEN_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [1, 3]},
        text={
            "rope_scaling": {
                "rope_type": "default",
                "mrope_interleaved": True,
                "mrope_section": [6, 5, 5],
            }
        },
        processor=with_videos(
            "Qwen3VLProcessor", "Qwen2VLImageProcessorFast", "Qwen3VLVideoProcessor"
        ),
        **QWEN_VL,
    ),
    Member(
        "Qwen2.5-Omni",
        "Qwen2_5OmniForConditionalGeneration",
        "Qwen2_5OmniConfig",
        {
            "thinker_config": {
                "text_config": {
                    **TEXT,
                    "rope_scaling": {"rope_type": "default", "mrope_section": [4, 6, 6]},
                },
                "vision_config": {**QWEN_VISION, "window_size": 32, "fullatt_block_indexes": [7]},
                "audio_config": OMNI_AUDIO,
            }
        },
        built_as="Qwen2_5OmniThinkerForConditionalGeneration",
        inside="thinker",
        ids={f"{kind}_token_index": f"<|{kind}_pad|>" for kind in ("image", "audio", "video")},
        processor=omni,
        tokens=OMNI_TOKENS,
        tokenizer_class="Qwen2TokenizerFast",
        path="language_model.model",
    ),
    wrapped(
        "GLM-4V",
        "Glm4vForConditionalGeneration",
        "Glm4vConfig",
        "glm4v_text",
        {**QWEN_VISION, "image_size": SIDE},
        text={
            "partial_rotary_factor": 0.5,
            "rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3]},
        },
        ids={"image_token_id": "<|image|>", "video_token_id": "<|video|>", **GLM_MARKS},
        processor=with_videos("Glm4vProcessor", "Glm4vImageProcessorFast", "Glm4vVideoProcessor"),
        tokens={
            "image_token": "<|image|>",
            "video_token": "<|video|>",
            **{name.removesuffix("_id"): token for name, token in GLM_MARKS.items()},
        },
    ),
    Member(
        "Whisper",
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            "vocab_size": VOCABULARY,
            "d_model": 128,
            **{f"{part}_layers": LAYERS for part in ("encoder", "decoder")},
            **{f"{part}_attention_heads": 4 for part in ("encoder", "decoder")},
            **{f"{part}_ffn_dim": 128 for part in ("encoder", "decoder")},
            "max_target_positions": 512,
            **{f"{name}_token_id": 1 for name in ("bos", "decoder_start", "pad")},
            "eos_token_id": 2,
        },
        processor=whisper,
        tokenizer_class="WhisperTokenizerFast",
        refusal="hidden states of WhisperForConditionalGeneration cannot be extracted: its decoder",
    ),
    wrapped(
        "Llama 4",
        "Llama4ForConditionalGeneration",
        "Llama4Config",
        "llama4_text",
        {
            **VISION,
            "vision_output_dim": 64,
            "projector_input_dim": 64,
            "projector_output_dim": 64,
            "pixel_shuffle_ratio": 0.5,
        },
        text={
            "intermediate_size_mlp": 128,
            "attention_chunk_size": WINDOW,
            # vLLM's CPU build has no experts whose router weighs their input: all layers are dense.
            "interleave_moe_layer_step": LAYERS + 1,
        },
        ids={
            "image_token_index": "<|patch|>",
            "boi_token_index": "<|image_start|>",
            "eoi_token_index": "<|image_end|>",
        },
        processor=llama4,
        tokens={name: f"<|{name}|>" for name in (*LLAMA4_TOKENS, "tile_y_separator")},
    ),
)

ZOO = {member.family: member for member in (*TEXT_MODELS, *MULTIMODAL_MODELS)}
LAYER_IDS = [2, 4, 5, 7]
LENGTHS = (1, 2, 15, 16, 17, 100, 300)


def rows() -> list[list[int]]:
    """Random token ids below those of the special tokens that processors add."""
    draw = random.Random(0)
    return [[draw.randrange(3, 512) for _ in range(length)] for length in LENGTHS]


def extract(models: list[Path], python: str = sys.executable, path: Path | None = None) -> None:
    """Extract the models' states with speculators' generator, in a process of its own.

    Packages in `path` come before those of `python`. What vLLM and the generator say is in
    `extract.log` beside the models.
    """
    env = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_MLA_DISABLE": "1"}
    if path:
        env["PYTHONPATH"] = str(path)
    with tempfile.TemporaryDirectory() as directory:
        request = Path(directory) / "request.json"
        options = {"rows": rows(), "layer_ids": LAYER_IDS, "max_model_len": 512}
        request.write_text(json.dumps({"models": list(map(str, models)), **options}))
        with (models[0].parent / "extract.log").open("w") as log:
            subprocess.run(
                [python, Path(__file__).with_name("extract.py"), request],
                env=env,
                stdout=log,
                stderr=log,
                check=True,
            )
