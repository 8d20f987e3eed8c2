"""The trainer's patches on a CPU: the right targets, the right attention, the right device."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import spec_compat

pytestmark = [pytest.mark.live, pytest.mark.slow]


@pytest.fixture
def draft_head(tiny_llama: Path) -> Any:
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    layer = LlamaConfig.from_pretrained(tiny_llama, num_hidden_layers=1)
    layer._attn_implementation = "simple_flex_attention"
    t2d = torch.zeros(512, dtype=torch.bool)
    t2d[100:356] = True
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=256,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=str(tiny_llama), architectures=[]),
        ),
    )
    return Eagle3DraftModel(config, t2d=t2d, d2t=torch.full((256,), 100))


def test_the_patches_are_in_place(draft_head: Any) -> None:
    from speculators.train import checkpointer, trainer  # noqa: F401

    spec_compat.require(stage="train")


def test_targets_are_the_verifiers_own_logits(draft_head: Any, tiny_llama: Path) -> None:
    """`verifier_lm_head` of the last captured state, which is taken before the final norm."""
    verifier: Any = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    captured = []
    verifier.model.norm.register_forward_pre_hook(lambda _, inputs: captured.append(inputs[0]))
    with torch.inference_mode():
        logits = verifier(torch.arange(3, 60)[None]).logits[..., 100:356]
        torch.testing.assert_close(draft_head.verifier_lm_head(captured[0]), logits)


def test_no_checkpoint_contains_the_verifiers_norm(draft_head: Any, tmp_path: Path) -> None:
    from safetensors import safe_open

    draft_head.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as checkpoint:
        assert not [key for key in checkpoint.keys() if "verifier" in key]  # noqa: SIM118


def test_dense_attention_equals_flex_attention() -> None:
    from speculators.models.eagle3 import attention

    spec_compat.require("train/dense-attention")
    torch.manual_seed(0)
    tokens, heads, kv_heads, head_dim = 256, 4, 2, 32
    mask_mod = attention.create_combined_mask_mod(torch.tensor([100, 70, 50]), tokens)
    mask = torch.nn.attention.flex_attention.create_block_mask(
        mask_mod, B=None, H=None, Q_LEN=tokens, KV_LEN=tokens, device="cpu"
    )
    for ttt_step in range(3):
        keys = tokens * (ttt_step + 1)
        shapes = [(heads, tokens), (kv_heads, keys), (kv_heads, keys)]
        ours = [torch.randn(1, *shape, head_dim, requires_grad=True) for shape in shapes]
        theirs = [tensor.detach().clone().requires_grad_() for tensor in ours]
        flex = torch.nn.attention.flex_attention.flex_attention(
            *theirs, block_mask=mask, enable_gqa=True, scale=0.2
        )
        dense = attention.flex_attention(*ours, block_mask=mask, enable_gqa=True, scale=0.2)
        torch.testing.assert_close(dense, flex)
        dense.square().sum().backward()
        flex.square().sum().backward()
        for mine, reference in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine.grad, reference.grad, rtol=1e-4, atol=1e-5)
        mask = attention.extend_mask_for_draft_tokens(mask)
