"""Chat templates as models have them, in structure, and byte-level tokenizers for them.

`said` is the oracle: what a model would have written in a turn, the end token included. It is
written down here from the template's text, and knows nothing of how masks are found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from tests import tiny_models

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
ALTERNATION = (
    "{% for m in turns %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/...') }}"
    "{% endif %}{% endfor %}"
)

CHATML = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
GENERATION_TAGS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration %}"
    "{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' }}"
    "{{ m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages and messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}{% set turns = messages %}"
    + ALTERNATION
    + "{% for m in messages %}{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
    "{{ '<start_of_turn>' + role + '\\n' + m['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{% set system = messages[0]['content'] + '\\n\\n' %}{% set turns = messages[1:] %}"
    "{% else %}{% set system = '' %}{% set turns = messages %}{% endif %}"
    + ALTERNATION
    + "{% for m in turns %}{% if m['role'] == 'user' %}"
    "{{ '[INST] ' + (system if loop.first else '') + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)
QWEN3 = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}"
    "{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m['role'] != 'assistant' %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% else %}"
    "{% set content = m['content'] %}{% set thought = m['reasoning_content'] or '' %}"
    "{% if not thought and '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].split('<think>')[-1] %}"
    "{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "{{ '<|im_start|>assistant\\n' }}"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}"
    "{{ '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}"
    "{% else %}{{ content }}{% endif %}{{ '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"
)
DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}{{ m['content'] }}"
    "{% elif m['role'] == 'user' %}{{ '<｜User｜>' + m['content'] }}"  # noqa: RUF001
    "{% elif m['role'] == 'assistant' %}"
    "{{ '<｜Assistant｜>' + m['content'].split('</think>')[-1] + eos_token }}"  # noqa: RUF001
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}"  # noqa: RUF001
)
# Reasoning is kept for the last turn alone; any other gets an empty block, and so does the prompt
# begin one that the model goes on with.
KIMI = (
    "{% for m in messages %}{{ '<|im_' + m['role'] + '|>' + m['role'] + '<|im_middle|>' }}"
    "{% if m['role'] == 'assistant' %}"
    "{{ '<think>' + ((m['reasoning_content'] or '') if loop.last else '') + '</think>' }}"
    "{% endif %}{{ m['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|im_assistant|>assistant<|im_middle|><think>' }}{% endif %}"
)
# No turn has an end of its own: the next turn's header ends it.
GLM = (
    "{{ '[gMASK]<sop>' }}{% for m in messages %}"
    "{{ '<|' + m['role'] + '|>\\n' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)


def _as_it_is(turn: Message, last: bool) -> str:
    return str(turn["content"])


def _trimmed(turn: Message, last: bool) -> str:
    return str(turn["content"]).strip()


def _qwen3(turn: Message, last: bool) -> str:
    thought, content = turn.get("reasoning_content"), turn["content"]
    if not last:
        return str(content)
    block = f"<think>\n{thought.strip(chr(10))}\n</think>\n\n" if thought else ""
    return block + str(content).lstrip("\n")


def _kimi(turn: Message, last: bool) -> str:
    thought = turn.get("reasoning_content")
    return f"{thought}</think>{turn['content']}" if last and thought else str(turn["content"])


@dataclass(frozen=True)
class Family:
    """One template; `end` is the token that ends the assistant's turn, `bos` begins the text."""

    source: str
    end: str
    tokens: tuple[str, ...]
    bos: str = "<s>"
    tags: tuple[str, ...] = ()
    text: Callable[[Message, bool], str] = _as_it_is
    system: bool = True

    def said(self, messages: list[Message]) -> list[str]:
        """What the assistant wrote in each of its turns; the last turn is the assistant's."""
        turns = [message for message in messages if message["role"] == "assistant"]
        return [self.text(turn, turn is messages[-1]) + self.end for turn in turns]

    def tokenizer(self, *, slow: bool = False) -> PreTrainedTokenizerBase:
        return _tokenizer(self, slow)


_IM = ("<|im_start|>", "<|im_end|>")
_TAGS = ("<think>", "</think>")
FAMILIES = {
    "chatml": Family(CHATML, "<|im_end|>", _IM),
    "generation-tags": Family(GENERATION_TAGS, "<|im_end|>", _IM),
    "llama3": Family(
        LLAMA3,
        "<|eot_id|>",
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        bos="<|begin_of_text|>",
        text=_trimmed,
    ),
    "gemma": Family(
        GEMMA,
        "<end_of_turn>",
        ("<start_of_turn>", "<end_of_turn>"),
        bos="<bos>",
        text=_trimmed,
        system=False,
    ),
    "mistral": Family(
        MISTRAL, "</s>", ("</s>",), text=lambda turn, last: " " + _as_it_is(turn, last)
    ),
    "qwen3": Family(QWEN3, "<|im_end|>", _IM, tags=_TAGS, text=_qwen3),
    "deepseek": Family(
        DEEPSEEK,
        "<｜end▁of▁sentence｜>",  # noqa: RUF001
        ("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"),  # noqa: RUF001
        bos="<｜begin▁of▁sentence｜>",  # noqa: RUF001
        tags=_TAGS,
    ),
    "kimi": Family(
        KIMI,
        "<|im_end|>",
        ("<|im_end|>", "<|im_middle|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>"),
        tags=_TAGS,
        text=_kimi,
    ),
    "glm": Family(GLM, "", ("[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|system|>")),
}


@cache
def _bpe() -> str:
    """A byte-level BPE that merges white space, as those of real models do."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = [*tiny_models.QUESTIONS, *tiny_models.ANSWERS, "user assistant system model"]
    bpe.train_from_iterator(["\n\n\n".join(texts), "    x\n\n" * 50, *texts], trainer)
    return bpe.to_str()


@cache
def _tokenizer(family: Family, slow: bool) -> Any:
    from tokenizers import Tokenizer
    from transformers import AddedToken, PreTrainedTokenizer, PreTrainedTokenizerFast

    class WithoutOffsets(PreTrainedTokenizer):  # type: ignore[misc]
        """A tokenizer in Python around a library of its own, as Kimi's is around tiktoken."""

        def __init__(self, **kwargs: Any) -> None:
            self.bpe = Tokenizer.from_str(_bpe())
            super().__init__(**kwargs)

        @property
        def vocab_size(self) -> int:
            return self.bpe.get_vocab_size()

        def get_vocab(self) -> dict[str, int]:
            return {**self.bpe.get_vocab(), **self.added_tokens_encoder}

        def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
            return self.bpe.encode(text).tokens

        def _convert_token_to_id(self, token: str) -> int | None:
            return self.bpe.token_to_id(token)

        def _convert_id_to_token(self, index: int) -> str:
            return self.bpe.id_to_token(index)

        def convert_tokens_to_string(self, tokens: list[str]) -> str:
            return str(self.bpe.decoder.decode(tokens))

    options: dict[str, Any] = {
        "bos_token": family.bos,
        "eos_token": family.end or "<|endoftext|>",
        "pad_token": "<|pad|>",
        "clean_up_tokenization_spaces": False,
    }
    if slow:
        tokenizer: Any = WithoutOffsets(**options)
    else:
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(_bpe()), **options)
    # As in Llama 3, whose `all_special_tokens` has none of its headers.
    for names, special in ((family.tokens, True), (family.tags, False)):
        tokenizer.add_tokens([AddedToken(n, special=special, normalized=False) for n in names])
    tokenizer.chat_template = family.source
    return tokenizer
