"""The trainer's patches on a CPU: the right targets, the right attention, the right device."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Cohere2Config,
    Cohere2ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
)

import spec_compat
from spec_compat.errors import UserError
from tests.live.test_draft_config import OPTIONS

pytestmark = [pytest.mark.live, pytest.mark.slow]


OFFSET, DRAFTED = 100, 256


def new_head(verifier: Path, **options: int) -> Any:
    """A head that drafts the tokens from 100 to 355 of a verifier's 512."""
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from spec_compat.pipeline.stages.training import layer_config

    t2d = torch.zeros(512, dtype=torch.bool)
    t2d[OFFSET : OFFSET + DRAFTED] = True
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer_config(
            AutoConfig.from_pretrained(verifier), SimpleNamespace(**{**vars(OPTIONS), **options})
        ),
        draft_vocab_size=DRAFTED,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=str(verifier), architectures=[]),
        ),
    )
    return Eagle3DraftModel(config, t2d=t2d, d2t=torch.full((DRAFTED,), OFFSET))


@pytest.fixture
def draft_head(tiny_llama: Path) -> Any:
    return new_head(tiny_llama)


@pytest.fixture
def tiny_gemma(tmp_path: Path) -> Path:
    """A verifier that scales by 1 + the norm's weight, and whose lm_head is its embeddings."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    model = GemmaForCausalLM(
        GemmaConfig(
            vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=3, **heads
        )
    )
    torch.nn.init.uniform_(model.model.norm.weight, -0.9, 1.5)
    model.save_pretrained(tmp_path / "gemma")
    return tmp_path / "gemma"


@pytest.fixture
def tiny_granite(tmp_path: Path) -> Path:
    return small(tmp_path, GraniteForCausalLM, GraniteConfig, logits_scaling=8.0)


@pytest.fixture
def tiny_gemma2(tmp_path: Path) -> Path:
    return small(tmp_path, Gemma2ForCausalLM, Gemma2Config, final_logit_softcapping=0.5)


@pytest.fixture
def tiny_cohere2(tmp_path: Path) -> Path:
    return small(tmp_path, Cohere2ForCausalLM, Cohere2Config, logit_scale=0.25)


def small(directory: Path, model_class: Any, config_class: Any, **options: Any) -> Path:
    """A verifier of a family that does something to its logits."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128}
    config = config_class(**sizes, **heads, num_hidden_layers=3, pad_token_id=0, **options)
    model_class(config).save_pretrained(directory / "verifier")
    return directory / "verifier"


def test_the_patches_are_in_place(draft_head: Any) -> None:
    from speculators.train import checkpointer, data, trainer  # noqa: F401

    spec_compat.require(stage="train")


@pytest.mark.parametrize(
    "name", ["tiny_llama", "tiny_gemma", "tiny_gemma2", "tiny_granite", "tiny_cohere2"]
)
def test_targets_are_the_verifiers_own_logits(name: str, request: pytest.FixtureRequest) -> None:
    """Of the last captured state, which is taken before the final norm."""
    from spec_compat.pipeline.head import targets
    from spec_compat.pipeline.inputs.verifier import Verifier

    path: Path = request.getfixturevalue(name)
    verifier: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    captured = []
    verifier.model.norm.register_forward_pre_hook(lambda _, inputs: captured.append(inputs[0]))
    with torch.inference_mode():
        logits = verifier(torch.arange(3, 60)[None]).logits[0]
    head = new_head(path)
    drafted = logits[:, OFFSET : OFFSET + DRAFTED]
    torch.testing.assert_close(targets.trained_on(head, captured[0][0]), drafted)
    choices = targets.GreedyVerifier(Verifier(str(path)))
    assert choices.tokens(captured[0][0]).tolist() == logits.argmax(dim=-1).tolist()
    targets.check(head, choices, captured[0][0])


def test_the_verifiers_norm_is_precise_and_gives_the_dtype_that_it_is_given(
    draft_head: Any, tiny_llama: Path
) -> None:
    """Sharded, the lm_head after it is in bfloat16, and the norm stays as it is."""
    from spec_compat.patches.train.verifier_norm import final_norm
    from speculators.models.eagle3 import core

    norm = final_norm(core, str(tiny_llama))
    normed = norm(torch.randn(3, len(norm.weight)).bfloat16())
    assert (norm.weight.dtype, normed.dtype) == (torch.float32, torch.bfloat16)


def test_an_lm_head_that_vllm_will_not_take_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    """It ties what the config says is tied, and extraction proves its rows with that."""
    from spec_compat.pipeline.head import targets
    from spec_compat.pipeline.inputs.verifier import Verifier

    verifier = Path(shutil.copytree(tiny_llama, tmp_path / "verifier"))
    config = json.loads((verifier / "config.json").read_text())
    (verifier / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    with pytest.raises(UserError, match=r"ties .* and its weights have another lm_head.weight"):
        targets.refuse(Verifier(str(verifier)))
    weights = load_file(verifier / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, verifier / "model.safetensors")
    targets.refuse(Verifier(str(verifier)))


@pytest.mark.parametrize("sharded", [False, True])
def test_a_verifier_without_its_norm_is_an_error(
    sharded: bool, tiny_llama: Path, tmp_path: Path
) -> None:
    from spec_compat.pipeline.head import targets
    from spec_compat.pipeline.inputs.verifier import Verifier

    verifier = Path(shutil.copytree(tiny_llama, tmp_path / "verifier"))
    weights = load_file(verifier / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, verifier / "model.safetensors")
    if sharded:
        index = {"weight_map": dict.fromkeys(weights, "model.safetensors")}
        (verifier / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"no model\.norm\.weight among its weights"):
        targets.GreedyVerifier(Verifier(str(verifier)))
    with pytest.raises(ValueError, match=r"no model\.norm\.weight among the verifier's weights"):
        new_head(verifier)


def test_no_checkpoint_contains_the_verifiers_norm(draft_head: Any, tmp_path: Path) -> None:
    draft_head.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as checkpoint:
        assert not [key for key in checkpoint.keys() if "verifier" in key]  # noqa: SIM118


def test_a_checkpoint_is_read_without_a_gpu(draft_head: Any, tmp_path: Path) -> None:
    from speculators.train.checkpointer import SingleGPUCheckpointer

    optimizer = torch.optim.AdamW(draft_head.named_parameters(), lr=0.1)
    SingleGPUCheckpointer(tmp_path).save_checkpoint(draft_head, optimizer, epoch=0)
    saved = draft_head.fc.weight.bfloat16()
    torch.nn.init.zeros_(draft_head.fc.weight)
    checkpointer = SingleGPUCheckpointer(tmp_path)
    checkpointer.load_model_state_dict(draft_head)
    checkpointer.load_optimizer_state_dict(draft_head, optimizer)
    torch.testing.assert_close(draft_head.fc.weight.bfloat16(), saved)


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


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_a_head_of_several_layers_has_a_finite_loss(layers: int, tiny_llama: Path) -> None:
    """Rows of different lengths, one of which nothing is learnt from, and padding after them."""
    torch.manual_seed(0)
    head = new_head(tiny_llama, num_layers=layers)
    assert len(head.layers) == layers
    lengths, total = (70, 1, 40), 128
    mask = torch.zeros(1, total)
    mask[:, 20:70] = 1
    rows = [torch.arange(1, length + 1) for length in lengths]
    positions = torch.cat([*rows, torch.zeros(total - sum(lengths))]).long()[None]
    *_, loss, _metrics = head(
        torch.randn(1, total, 3 * 64),
        torch.randint(3, 512, (1, total)),
        lengths=torch.tensor(lengths),
        loss_mask=mask,
        position_ids=positions,
        verifier_last_hidden_states=torch.randn(1, total, 64),
        ttt_steps=3,
        ttt_step_loss_decay=1.0,
    )
    loss.backward()
    assert torch.isfinite(loss)
    assert all(torch.isfinite(p.grad).all() for p in head.parameters() if p.grad is not None)


@pytest.fixture
def one_process() -> Iterator[None]:
    distributed = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_a_sharded_head_begins_with_no_weight_unset(tiny_llama: Path) -> None:
    """As the trainer does on several GPUs: empty the layers, shard them, reset what can be."""
    from speculators.train import trainer

    spec_compat.require("train/sharded-norms")

    def unset(shard: Any) -> list[str]:
        head = new_head(tiny_llama)
        shard(head)
        (layer,) = head.layers
        layer.to_empty(device="cpu")
        for parameter in layer.parameters():
            torch.nn.init.constant_(parameter, float("nan"))
        for part in layer.modules():
            if hasattr(part, "reset_parameters"):
                part.reset_parameters()
        return [name for name, p in layer.named_parameters() if p.full_tensor().isnan().any()]

    ours: Any = trainer.apply_fully_sharded
    assert unset(ours) == []
    norms = ["hidden_norm.weight", "input_layernorm.weight", "post_attention_layernorm.weight"]
    assert sorted(unset(ours.__wrapped__)) == norms
