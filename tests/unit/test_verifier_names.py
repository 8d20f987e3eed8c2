"""Which of a checkpoint's tensors are the decoder's embeddings, norm and lm_head."""

import pytest
from spec_compat.patches.train._verifier import named

ENDS = ("embed_tokens.weight", "norm.weight")
PLAIN = [f"model.{end}" for end in ENDS] + ["lm_head.weight", "model.layers.0.self_attn.o.weight"]
KIMI = [f"language_model.{name}" for name in PLAIN] + ["vision_tower.norm.weight"]
# The part that predicts several tokens has its own of each.
DEEPSEEK = [*PLAIN, *(f"model.layers.61.{end}" for end in ENDS), "model.layers.61.lm_head.weight"]
QWEN_VL = [f"model.language_model.{end}" for end in ENDS] + ["lm_head.weight"]


@pytest.mark.parametrize(
    ("names", "decoder", "lm_head"),
    [
        (PLAIN, "model.", "lm_head.weight"),
        (KIMI, "language_model.model.", "language_model.lm_head.weight"),
        (DEEPSEEK, "model.", "lm_head.weight"),
        (QWEN_VL, "model.language_model.", "lm_head.weight"),
        (QWEN_VL[:2], "model.language_model.", None),
    ],
)
def test_the_decoders_own(names: list[str], decoder: str, lm_head: str | None) -> None:
    assert named("model.embed_tokens.weight", names) == f"{decoder}embed_tokens.weight"
    assert named("embed_tokens.weight", names) == f"{decoder}embed_tokens.weight"
    assert named("model.norm.weight", names) == f"{decoder}norm.weight"
    assert named("lm_head.weight", names) == lm_head


def test_two_decoders_are_not_guessed_between() -> None:
    names = [f"{part}.model.embed_tokens.weight" for part in ("thinker", "talker")]
    with pytest.raises(ValueError, match="may be any of talker"):
        named("model.embed_tokens.weight", names)
