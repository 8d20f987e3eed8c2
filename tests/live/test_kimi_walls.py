"""Where plain speculators 0.3.0 stops at Kimi-K2.5, and that it goes on here.

The whole run is in tests/e2e/test_kimi.py.
"""

import inspect
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import spec_compat
from spec_compat.pipeline import targets
from tests import kimi
from tests.conftest import Script

pytestmark = [pytest.mark.live, pytest.mark.slow]

ROWS = [list(range(300, 340))]
CODE = "contains custom code which must be executed"
TRAINED = range(1000, 1064)


@pytest.mark.parametrize(
    ("disabled", "symptom"),
    [
        ("extract/trust-remote-code", CODE),
        (
            "extract/capture,extract/executor",
            "Model KimiK25ForConditionalGeneration does not support hidden state extraction",
        ),
    ],
)
def test_extraction_stops(disabled: str, symptom: str, generate: Script, mini_kimi: Path) -> None:
    env = {"SPEC_COMPAT_DISABLE": disabled, **kimi.ENVIRONMENT}
    process = generate(mini_kimi, ROWS, layer_ids=[2, 4, 5, 7], max_model_len=64, env=env)
    assert process.returncode != 0
    assert symptom in process.stderr + process.stdout


def test_code_that_is_not_trusted_does_not_run(generate: Script, mini_kimi: Path) -> None:
    env = {"SPEC_COMPAT_TRUST_REMOTE_CODE": "0", **kimi.ENVIRONMENT}
    process = generate(mini_kimi, ROWS, layer_ids=[2, 4, 5, 7], max_model_len=64, env=env)
    assert process.returncode != 0
    assert CODE in process.stderr


def test_masks_need_no_offsets_and_no_pattern(mini_kimi: Path, tmp_path: Path) -> None:
    """The pattern has an empty block of reasoning in it, and no turn with reasoning matches."""
    from datasets import Dataset
    from speculators.data_generation import preprocessing

    spec_compat.require("prepare/loss-mask")
    tokenizer = transformers.AutoTokenizer.from_pretrained(mini_kimi, trust_remote_code=True)
    assert "<think></think>" in preprocessing._detect_assistant_pattern(tokenizer)
    talks = kimi.write_conversations(tmp_path / "talks.jsonl", 4)
    rows = Dataset.from_list([json.loads(line) for line in talks.read_text("utf-8").splitlines()])
    build: Any = preprocessing.build_eagle3_dataset
    assert len(build.__wrapped__(rows, tokenizer, num_proc=None)) == 0
    assert len(build(rows, tokenizer, num_proc=None)) == 4


@pytest.fixture
def core() -> Any:
    from speculators.models.eagle3 import core

    spec_compat.require("train/verifier-weights")
    spec_compat.require("train/verifier-norm")
    return core


def head(verifier: Path) -> Any:
    """A draft head for the verifier, as speculators makes it."""
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    layer = transformers.LlamaConfig(
        vocab_size=kimi.VOCABULARY, hidden_size=kimi.HIDDEN, intermediate_size=64,
        num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4,
    )  # fmt: skip
    layer._attn_implementation = "simple_flex_attention"
    t2d = torch.zeros(kimi.VOCABULARY, dtype=torch.bool)
    t2d[list(TRAINED)] = True
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=len(TRAINED),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=str(verifier), architectures=[]),
        ),
    )
    return Eagle3DraftModel(config, t2d=t2d, d2t=torch.full((len(TRAINED),), TRAINED[0]))


def test_the_trainer_stops_at_the_config_and_at_the_names(
    core: Any, mini_kimi: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Trusting(transformers.AutoConfig):  # type: ignore[misc]
        @classmethod
        def from_pretrained(cls, name: str) -> Any:
            return transformers.AutoConfig.from_pretrained(name, trust_remote_code=True)

    class Within(Trusting):
        @classmethod
        def from_pretrained(cls, name: str) -> Any:
            return super().from_pretrained(name).text_config

    plain = inspect.unwrap(core.Eagle3DraftModel._setup_embeddings_and_lm_heads)
    monkeypatch.setattr(core.Eagle3DraftModel, "_setup_embeddings_and_lm_heads", plain)
    monkeypatch.setattr(core, "load_model_layers", core.load_model_layers.__wrapped__)
    walls = [
        (transformers.AutoConfig, ValueError, CODE),
        (Trusting, AttributeError, "hidden_size"),
        (Within, ValueError, "None of the requested tensor names were found in the index"),
    ]
    for config, error, message in walls:
        monkeypatch.setattr(core, "AutoConfig", config)
        with pytest.raises(error, match=message):
            head(mini_kimi)


@pytest.mark.parametrize("int4", [False, True])
def test_embeddings_norm_and_lm_head_are_found_under_the_wrapper(
    int4: bool, core: Any, mini_kimi: Path, tmp_path: Path
) -> None:
    """Also where the experts are packed to four bits: these three are not."""
    model = kimi.make(tmp_path / "int4", int4=True) if int4 else mini_kimi
    text = kimi.language_model(mini_kimi, torch.float32)
    found = head(model)
    torch.testing.assert_close(found.embed_tokens.weight, text.model.embed_tokens.weight)
    states = torch.randn(5, kimi.HIDDEN)
    with torch.inference_mode():
        logits = text.lm_head(text.model.norm(states))
        torch.testing.assert_close(found.verifier_lm_head(states), logits[:, list(TRAINED)])
    chosen = targets.Verifier(str(model), trust_remote_code=True).tokens(states)
    assert chosen.tolist() == logits.argmax(dim=-1).tolist()


def test_a_quantised_lm_head_is_not_replaced_by_the_embeddings(
    core: Any, mini_kimi: Path, tmp_path: Path
) -> None:
    packed = shutil.copytree(mini_kimi, tmp_path / "packed")
    index = packed / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("lm_head.weight", "lm_head.weight_packed"))
    with pytest.raises(ValueError, match=r"language_model.lm_head.weight_packed is quantised"):
        head(packed)
    with pytest.raises(spec_compat.errors.UserError, match="its lm_head is quantised"):
        targets.Verifier(str(packed), trust_remote_code=True)
