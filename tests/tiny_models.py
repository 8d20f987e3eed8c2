"""Tiny verifiers with random weights, for tests that run the real vLLM and the real speculators.

Every directory is complete: bf16 weights, config, and a byte-level BPE tokenizer with a ChatML
template, so that it goes wherever a downloaded model goes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

VOCABULARY = 512
CONTEXT = 512
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

# Few words, all of them on both sides of a conversation: the merges of the BPE come from here.
QUESTIONS = (
    "What is the name of the river near the old town?",
    "How many bridges cross the water between the two hills?",
    "Who keeps the tall light at the end of the harbour?",
    "When does the small train leave the valley in winter?",
)
ANSWERS = (
    "The river near the old town is called the Linn, and it runs to the sea.",
    "There are seven bridges, and the oldest of them is made of stone.",
    "A keeper lives there with a dog and looks after the light every night.",
    "In winter the small train leaves at nine in the morning and again at noon.",
)


def make_tiny_llama(path: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Write a random Llama (8 layers, hidden 64, 4 heads of 32, 2 KV heads) and its tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return _write(path, LlamaForCausalLM, LlamaConfig(**geometry(overrides)), seed)


def make_tiny_qwen3(path: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Write a random Qwen3 of the same geometry, with its per-head norms, and its tokenizer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return _write(path, Qwen3ForCausalLM, Qwen3Config(**geometry(overrides)), seed)


def make_tokenizer(
    class_name: str = "PreTrainedTokenizerFast", **options: Any
) -> PreTrainedTokenizerFast:
    """A byte-level BPE of 512 tokens, trained on the sentences above; the same every time."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator([*QUESTIONS, *ANSWERS, "user assistant system"], trainer)
    tokenizer: PreTrainedTokenizerFast = getattr(transformers, class_name)(
        tokenizer_object=bpe,
        bos_token="<|im_start|>",  # noqa: S106
        eos_token="<|im_end|>",  # noqa: S106
        pad_token="<|endoftext|>",  # noqa: S106
        model_max_length=CONTEXT,
        **options,
    )
    tokenizer.chat_template = CHATML
    return tokenizer


def write_conversations(path: Path, rows: int, *, first: int = 0) -> Path:
    """Write `rows` different conversations, one JSON object a line, two to six turns each."""
    lines = []
    for row in range(first, first + rows):
        turns = []
        for turn in range(1 + row % 3):
            pick = row + turn
            turns += [
                {"from": "human", "value": f"{row}. {QUESTIONS[pick % len(QUESTIONS)]}"},
                {"from": "gpt", "value": f"{ANSWERS[(pick // 4) % len(ANSWERS)]} ({row})"},
            ]
        lines.append(json.dumps({"id": f"row-{row}", "conversations": turns}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def geometry(overrides: dict[str, Any]) -> dict[str, Any]:
    """The options of a text config of transformers."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": CONTEXT,
        "rope_theta": 50000.0,
        # The layers differ by 46 % and more, bf16 by 0.7 %: a state one layer off does not pass.
        "initializer_range": 0.03,
        "tie_word_embeddings": False,
        "bos_token_id": SPECIAL_TOKENS.index("<|im_start|>"),
        "eos_token_id": SPECIAL_TOKENS.index("<|im_end|>"),
        "pad_token_id": SPECIAL_TOKENS.index("<|endoftext|>"),
        **overrides,
    }


def randomise(model: PreTrainedModel) -> None:
    """Norm weights of exactly one would hide a norm that is applied twice or not at all."""
    import torch

    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):  # Gemma's are zero, and mean one
            parameter.data += torch.empty_like(parameter).uniform_(-0.5, 0.5)


def _write(path: Path, model_class: type[PreTrainedModel], config: Any, seed: int) -> Path:
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
        randomise(model)
    model.to(torch.bfloat16).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path
