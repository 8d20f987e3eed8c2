"""A miniature of Kimi-K2.5 with random weights: its classes, names and vocabulary, tiny widths.

A DeepSeek-V3 language model with experts inside a vision wrapper; config, tokenizer and image
processor are Python code in the model's directory (see tests/kimi_files). vLLM 0.16 runs it on a
CPU with VLLM_MLA_DISABLE=1.
"""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests import tiny_models

FILES = Path(__file__).parent / "kimi_files"
VOCABULARY = 163_840
BASE_TOKENS = 163_584
LAYERS = 8
HIDDEN = 64
# As on vLLM's side of the CPU: without it, MLA is refused there.
ENVIRONMENT = {"VLLM_MLA_DISABLE": "1"}
SPECIAL_TOKENS = {
    163584: "[BOS]",
    163585: "[EOS]",
    163586: "<|im_end|>",
    163587: "<|im_user|>",
    163588: "<|im_assistant|>",
    163594: "<|im_system|>",
    163595: "<|tool_calls_section_begin|>",
    163596: "<|tool_calls_section_end|>",
    163597: "<|tool_call_begin|>",
    163598: "<|tool_call_argument_begin|>",
    163599: "<|tool_call_end|>",
    163601: "<|im_middle|>",
    163602: "<|media_begin|>",
    163603: "<|media_content|>",
    163604: "<|media_end|>",
    163605: "<|media_pad|>",
    163606: "<think>",
    163607: "</think>",
    163838: "[UNK]",
    163839: "[PAD]",
}
TEXT_CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "kimi_k2",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": LAYERS,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 48,
    "qk_rope_head_dim": 16,
    "v_head_dim": 64,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.827,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 64.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "max_position_embeddings": 8192,
    "initializer_range": 0.08,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 0,
    "bos_token_id": 163584,
    "eos_token_id": 163586,
    "pad_token_id": 163839,
    "torch_dtype": "bfloat16",
}
# As compressed-tensors writes it: the experts alone are packed.
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group",
                "group_size": 32, "dynamic": False, "actorder": None,
            },
        }
    },
    "ignore": [
        "re:.*lm_head", "re:.*self_attn.*", "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*", "re:vision_tower.*", "re:mm_projector.*",
    ],
}  # fmt: skip
VISION_CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "patch_size": 14,
    "init_pos_emb_height": 4,
    "init_pos_emb_width": 4,
}
# Columns and ways of writing of mlabonne/open-perfectblend.
ASKED = (
    "Let $f(x) = 3x + {n}$. What is $f(2)$?",
    "Write a Python function that adds {n} to its argument.",
    "Q: A farmer has {n} sheep and buys 12 more. How many are there?\nOptions: (a) {n} (b) more",
    "请用一句话介绍数字{n}。",
    "Summarise: café no. {n} opens at nine — and closes “late” 🙂",
)
ANSWERED = (
    "We have $f(2) = 3 \\cdot 2 + {n}$.\n\nThe answer is: $\\boxed{{6 + {n}}}$",
    "```python\ndef add(x):\n    return x + {n}\n```\n\nIt returns the sum.",
    "  There are {n} + 12 sheep.\n#### {n} + 12\n",
    "{n}是一个整数。",
    "The café opens at nine 🙂 and that is all.",
)
SOURCES = ("meta-math/MetaMathQA", "theblackcat102/evol-codealpaca-v1", "lmsys/lmsys-chat-1m")


def make(path: Path, *, seed: int = 0, int4: bool = False, **overrides: Any) -> Path:
    """Write the miniature; `overrides` are fields of its language model's config.

    With `int4` the experts are packed to four bits with a scale for each 32 weights.
    """
    quantised = {"quantization_config": INT4} if int4 else {}
    text = {**TEXT_CONFIG, **quantised, **overrides}
    path.mkdir(parents=True)
    _write_json(path / "config.json", _config(text))
    _write_weights(path, text, seed)
    _write_tokenizer(path)
    processor = {"AutoImageProcessor": "kimi_k25_vision_processing.KimiK25VisionProcessor"}
    _write_json(path / "preprocessor_config.json", {"auto_map": processor, "patch_size": 14})
    for file in FILES.iterdir():
        if file.is_file():
            shutil.copyfile(file, path / file.name)
    return path


def write_conversations(path: Path, rows: int) -> Path:
    """Rows as open-perfectblend has them: `conversations` of from and value, and `source`."""
    lines = []
    for row in range(rows):
        turns = []
        if row % 4 == 3:
            turns.append({"from": "system", "value": "You answer in few words."})
        for turn in range(1 + row % 3):
            pick = (row + turn) % len(ASKED)
            turns += [
                {"from": "human", "value": ASKED[pick].format(n=row + turn)},
                {"from": "gpt", "value": ANSWERED[pick].format(n=row + turn)},
            ]
        lines.append({"conversations": turns, "source": SOURCES[row % len(SOURCES)]})
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    path.write_text(text, encoding="utf-8")
    return path


def language_model(path: Path, dtype: Any) -> Any:
    """transformers' own DeepSeek-V3 with the language model's weights, unpacked: the oracle."""
    from safetensors.torch import load_file
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    text = json.loads((path / "config.json").read_text())["text_config"]
    text.pop("quantization_config", None)
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**text)).to(dtype).eval()
    stored = {
        name.removeprefix("language_model."): tensor
        for file in sorted(path.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
        if name.startswith("language_model.")
    }
    model.load_state_dict(_unpacked(stored, dtype))
    return model


def _unpacked(stored: dict[str, Any], dtype: Any) -> dict[str, Any]:
    """The weights under their own names: those in four bits multiplied by their scales."""
    import torch

    weights = {}
    for name, tensor in stored.items():
        whole = name.removesuffix("_packed")
        if whole != name:
            values = (tensor[..., None] >> torch.arange(0, 32, 4) & 15) - 8
            groups = values.flatten(1).float().unflatten(1, (-1, 32))
            weights[whole] = (groups * stored[f"{whole}_scale"].float()[..., None]).flatten(1)
        elif not name.endswith(("_scale", "_shape")):
            weights[name] = tensor
    return {name: tensor.to(dtype) for name, tensor in weights.items()}


def _config(text: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "auto_map": {"AutoConfig": "configuration_kimi_k25.KimiK25Config"},
        "text_config": text,
        "vision_config": {**VISION_CONFIG, "mm_hidden_size": text["hidden_size"]},
        "media_placeholder_token_id": 163605,
        "pad_token_id": text["pad_token_id"],
        "bos_token_id": text["bos_token_id"],
        "eos_token_id": text["eos_token_id"],
        "tie_word_embeddings": False,
        "torch_dtype": text["torch_dtype"],
    }


def _write_weights(path: Path, text: dict[str, Any], seed: int) -> None:
    """Shards with an index; the names are those of the published checkpoint."""
    import torch
    from safetensors.torch import save_file

    dtype = getattr(torch, text["torch_dtype"])
    language = _language_weights(text, seed)
    if "quantization_config" in text:
        language = {name: t for pair in language.items() for name, t in _packed(*pair, dtype)}
    tensors = {f"language_model.{name}": tensor for name, tensor in language.items()}
    tensors |= _vision_weights(seed, text["hidden_size"])
    shards: list[dict[str, Any]] = [{}, {}]
    for number, (name, tensor) in enumerate(tensors.items()):
        precise = name.endswith("e_score_correction_bias")
        if tensor.is_floating_point():
            tensor = tensor.to(torch.float32 if precise else dtype)
        tensor = tensor.detach().contiguous()
        shards[number * len(shards) // len(tensors)][name] = tensor
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    size = sum(t.numel() * t.element_size() for shard in shards for t in shard.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    _write_json(path / "model.safetensors.index.json", index)


def _language_weights(text: dict[str, Any], seed: int) -> dict[str, Any]:
    import torch
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = DeepseekV3ForCausalLM(DeepseekV3Config(**text))
        # Norm weights of exactly one would hide a norm that is applied twice or not at all.
        for name, tensor in model.state_dict().items():
            if name.endswith(("norm.weight", "e_score_correction_bias")):
                torch.nn.init.uniform_(tensor, *((0.5, 1.5) if "norm" in name else (0.0, 0.2)))
    return dict(model.state_dict())


def _packed(name: str, tensor: Any, dtype: Any) -> Iterator[tuple[str, Any]]:
    """A weight as it is, or of an expert: eight values to an int32, scales and the shape."""
    import torch

    if ".mlp.experts." not in name:
        yield name, tensor
        return
    groups = tensor.detach().float().unflatten(1, (-1, 32))
    scale = (groups.abs().amax(dim=-1, keepdim=True) / 7).to(dtype).float()
    values = (groups / scale).round().clamp(-8, 7).flatten(1).to(torch.int32) + 8
    shifted = values.unflatten(1, (-1, 8)) << torch.arange(0, 32, 4, dtype=torch.int32)
    yield f"{name}_packed", shifted.sum(dim=-1, dtype=torch.int32)
    yield f"{name}_scale", scale[..., 0].to(dtype)
    yield f"{name}_shape", torch.tensor(tensor.shape)


def _vision_weights(seed: int, out: int) -> dict[str, Any]:
    import torch

    width, inner = VISION_CONFIG["hidden_size"], VISION_CONFIG["intermediate_size"]
    block = "vision_tower.encoder.blocks.0."
    shapes = {
        "vision_tower.patch_embed.proj.weight": (width, 3, 14, 14),
        "vision_tower.patch_embed.proj.bias": (width,),
        "vision_tower.patch_embed.pos_emb.weight": (4, 4, width),
        **{f"{block}{norm}.{part}": (width,) for norm in ("norm0", "norm1")
           for part in ("weight", "bias")},
        f"{block}wqkv.weight": (3 * width, width),
        f"{block}wqkv.bias": (3 * width,),
        f"{block}wo.weight": (width, width),
        f"{block}wo.bias": (width,),
        f"{block}mlp.fc0.weight": (inner, width),
        f"{block}mlp.fc0.bias": (inner,),
        f"{block}mlp.fc1.weight": (width, inner),
        f"{block}mlp.fc1.bias": (width,),
        "vision_tower.encoder.final_layernorm.weight": (width,),
        "vision_tower.encoder.final_layernorm.bias": (width,),
        "mm_projector.pre_norm.weight": (width,),
        "mm_projector.pre_norm.bias": (width,),
        "mm_projector.proj.0.weight": (4 * width, 4 * width),
        "mm_projector.proj.0.bias": (4 * width,),
        "mm_projector.proj.2.weight": (out, 4 * width),
        "mm_projector.proj.2.bias": (out,),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) * 0.05 for name, shape in shapes.items()}


def _write_tokenizer(path: Path) -> None:
    ranks = _ranks()
    lines = (base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(ranks))
    (path / "tiktoken.model").write_bytes(b"".join(lines))
    added = {
        str(index): {
            "content": token, "special": "think>" not in token, "normalized": False,
            "lstrip": False, "rstrip": False, "single_word": False,
        }
        for index, token in SPECIAL_TOKENS.items()
    }  # fmt: skip
    content = {
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "added_tokens_decoder": added,
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "unk_token": "[UNK]",
        "pad_token": "[PAD]",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1000000000000000019884624838656,
    }
    _write_json(path / "tokenizer_config.json", content)


def _ranks() -> list[bytes]:
    """The 256 bytes, a few hundred merges, and strings that no text contains to fill it up."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers.models.gpt2.tokenization_gpt2 import bytes_to_unicode

    to_byte = {character: byte for byte, character in bytes_to_unicode().items()}
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=800, initial_alphabet=sorted(to_byte), show_progress=False
    )
    bpe.train_from_iterator([*ASKED, *ANSWERED, *tiny_models.QUESTIONS], trainer)
    learnt = sorted(bpe.get_vocab().items(), key=lambda item: item[1])
    tokens = [bytes(to_byte[character] for character in token) for token, _ in learnt]
    filler = (b"\xff" + number.to_bytes(3, "big") for number in range(BASE_TOKENS - len(tokens)))
    return [*tokens, *filler]


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
