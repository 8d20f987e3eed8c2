"""Where plain speculators 0.3.0 stops at Kimi-K2.5, and that it goes on here.

The whole run is in tests/e2e/test_kimi.py.
"""

import importlib
import inspect
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import spec_compat
from spec_compat.errors import UserError
from spec_compat.pipeline import verify
from spec_compat.pipeline.head import targets
from spec_compat.pipeline.inputs.verifier import Verifier
from tests import kimi
from tests.conftest import Script

pytestmark = [pytest.mark.live, pytest.mark.slow]

ROWS = [list(range(300, 340))]
CODE = "contains custom code which must be executed"
TRAINED = range(1000, 1064)


@pytest.mark.parametrize(
    ("disabled", "enabled", "symptom"),
    [
        ("extract/trust-remote-code", "", CODE),
        (
            "extract/capture,extract/executor",
            "",
            "Model KimiK25ForConditionalGeneration does not support hidden state extraction",
        ),
        (
            "extract/capture,extract/executor",
            "serve",  # through that gate
            "'KimiK25ForConditionalGeneration' object has no attribute 'model'",
        ),
    ],
)
def test_extraction_stops(
    disabled: str, enabled: str, symptom: str, generate: Script, mini_kimi: Path
) -> None:
    env = {"SPEC_COMPAT_DISABLE": disabled, "SPEC_COMPAT_ENABLE": enabled, **kimi.ENVIRONMENT}
    process = generate(mini_kimi, ROWS, layer_ids=[2, 4, 5, 7], max_model_len=64, env=env)
    assert process.returncode != 0
    assert symptom in process.stderr + process.stdout


@pytest.mark.parametrize(
    ("module", "name", "patch_id"),
    [
        ("preprocessing", "AutoTokenizer", "prepare/trust-remote-code"),
        ("vllm_hidden_states_generator", "AutoTokenizer", "extract/trust-remote-code"),
        ("vllm_hidden_states_generator", "AutoConfig", "extract/trust-remote-code"),
    ],
)
def test_every_load_of_speculators_asks_for_trust(
    module: str, name: str, patch_id: str, mini_kimi: Path
) -> None:
    """It loads what it loads by the name alone."""
    imported = importlib.import_module(f"speculators.data_generation.{module}")
    spec_compat.require(patch_id)
    with pytest.raises(ValueError, match=CODE):
        getattr(transformers, name).from_pretrained(mini_kimi)
    assert getattr(imported, name).from_pretrained(mini_kimi)


def test_code_that_is_not_trusted_does_not_run(generate: Script, mini_kimi: Path) -> None:
    env = {"SPEC_COMPAT_TRUST_REMOTE_CODE": "0", **kimi.ENVIRONMENT}
    process = generate(mini_kimi, ROWS, layer_ids=[2, 4, 5, 7], max_model_len=64, env=env)
    assert process.returncode != 0
    assert CODE in process.stderr


@pytest.fixture
def tokenizer(mini_kimi: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(mini_kimi, trust_remote_code=True)


def test_masks_need_no_offsets(
    tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from datasets import Dataset
    from speculators.data_generation import preprocessing

    spec_compat.require("prepare/loss-mask")
    talks = kimi.write_conversations(tmp_path / "talks.jsonl", 4)
    rows = Dataset.from_list([json.loads(line) for line in talks.read_text("utf-8").splitlines()])
    build: Any = preprocessing.build_eagle3_dataset
    with caplog.at_level("WARNING"):
        assert len(build.__wrapped__(rows, tokenizer, num_proc=None)) == 0
    assert "return_offset_mapping is not available when using Python tokenizers" in caplog.text
    assert len(build(rows, tokenizer, num_proc=None)) == 4


def test_the_dataset_is_read_as_the_hub_has_it(
    mini_kimi: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its name, out of Parquet; a directory of that name is taken for the repository."""
    import pyarrow as pa
    from pyarrow import parquet

    from spec_compat.pipeline.run import plan
    from spec_compat.pipeline.stages import tokenization as prepare

    talks = kimi.write_conversations(tmp_path / "talks.jsonl", 6)
    written = [json.loads(line) for line in talks.read_text("utf-8").splitlines()]
    repository = tmp_path / "mlabonne" / "open-perfectblend" / "data"
    repository.mkdir(parents=True)
    parquet.write_table(pa.Table.from_pylist(written), repository / "train-0-of-1.parquet")
    monkeypatch.chdir(tmp_path)
    (dataset,) = plan.name_datasets(("open-perfectblend",))
    rows, tokenizer = prepare.load_and_preprocess_dataset(
        target_model_path=str(mini_kimi), train_data_path=dataset.source, seq_length=512,
        build_dataset_num_proc=None, seed=0, token_freq_path=str(tmp_path / "token_freq.pt"),
        cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip
    said = {
        "".join(f"{turn['value']}<|im_end|>" for turn in row["conversations"]
                if turn["from"] == "gpt")
        for row in written
    }  # fmt: skip
    trained = [row["input_ids"][row["loss_mask"] == 1] for row in rows]
    assert {tokenizer.decode(ids, spaces_between_special_tokens=False) for ids in trained} == said


def test_a_turn_with_reasoning_is_not_in_the_pattern(tokenizer: Any) -> None:
    """It has the empty block of the turns without; a mask that is rendered has the reasoning."""
    from datasets import Dataset
    from speculators.data_generation import preprocessing

    pattern = preprocessing._detect_assistant_pattern(tokenizer)
    assert "<think></think>" in pattern
    asked = {"role": "user", "content": "What is 2 + 2?"}
    call = {"id": "f:0", "function": {"name": "f", "arguments": "{}"}}
    for reasoning, matching in (("", 1), ("Two and two.", 0)):
        turn = {"role": "assistant", "content": "Wait.", "reasoning_content": reasoning}
        talk = [asked, {**turn, "tool_calls": [call]}]
        text = tokenizer.apply_chat_template(talk, tokenize=False)
        assert len(re.findall(pattern, text, re.DOTALL)) == matching, text
    told = {"conversations": [asked, {**turn, "tool_calls": json.dumps([call])}]}
    (row,) = preprocessing.build_eagle3_dataset(Dataset.from_list([told]), tokenizer, num_proc=None)
    ids = row["input_ids"][row["loss_mask"] == 1]
    said = tokenizer.decode(ids, spaces_between_special_tokens=False)
    assert said.startswith("Two and two.</think>Wait.")


@pytest.fixture
def core() -> Any:
    from speculators.models.eagle3 import core

    spec_compat.require("train/verifier-weights")
    spec_compat.require("train/verifier-norm")
    return core


def head(verifier: Path, layer: Any = None) -> Any:
    """A draft head for the verifier, as speculators makes it; of narrow layers by default."""
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    layer = layer or transformers.LlamaConfig(
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
    def loads(of: Callable[[Any], Any]) -> Any:
        """AutoConfig, trusting, with what `of` makes of the wrapper's config."""
        auto = transformers.AutoConfig
        return SimpleNamespace(
            from_pretrained=lambda name: of(auto.from_pretrained(name, trust_remote_code=True))
        )

    def with_width(config: Any) -> Any:
        config.hidden_size = config.text_config.hidden_size
        return config

    plain = inspect.unwrap(core.Eagle3DraftModel._setup_embeddings_and_lm_heads)
    load = core.load_model_layers.__wrapped__
    monkeypatch.setattr(core.Eagle3DraftModel, "_setup_embeddings_and_lm_heads", plain)
    monkeypatch.setattr(core, "load_model_layers", load)
    walls = [
        (transformers.AutoConfig, ValueError, CODE),
        (loads(lambda config: config), AttributeError, "hidden_size"),
        (loads(with_width), AttributeError, "vocab_size"),
        (
            loads(lambda config: config.text_config),
            ValueError,
            "None of the requested tensor names were found in the index",
        ),
    ]
    for config, error, message in walls:
        monkeypatch.setattr(core, "AutoConfig", config)
        with pytest.raises(error, match=message):
            head(mini_kimi)
    # Silent: where the embeddings are found and the lm_head is not, they take its place.
    embeddings = "language_model.model.embed_tokens.weight"
    assert set(load([embeddings, "lm_head.weight"], str(mini_kimi))) == {embeddings}


def test_the_geometry_of_the_verifiers_attention_is_none_for_a_head(
    core: Any, mini_kimi: Path, tmp_path: Path
) -> None:
    """transformers calls the rotary part of a key its width; what is asked for is what is made."""
    from spec_compat.pipeline.head.geometry import expected_shapes
    from spec_compat.pipeline.run import plan
    from spec_compat.pipeline.stages import training as train
    from spec_compat.pipeline.run.config import RunConfig

    wrapper = transformers.AutoConfig.from_pretrained(mini_kimi, trust_remote_code=True)
    theirs = transformers.DeepseekV3Config(**kimi.TEXT_CONFIG)
    assert (theirs.head_dim, theirs.v_head_dim, theirs.qk_head_dim) == (16, 64, 64)
    asked = {"draft_heads": 6, "draft_kv_heads": 2, "draft_head_dim": 32,
             "draft_intermediate_size": 96}  # fmt: skip
    data = [str(kimi.write_conversations(tmp_path / "talks.jsonl", 2))]
    for given, expected in (({}, (4, 4, 64, 128)), (asked, tuple(asked.values()))):
        config = plan.make(
            RunConfig(
                model=str(mini_kimi), data=data, output=tmp_path / "run", trust_remote_code=True,
                draft_vocab_size=len(TRAINED), **given,
            )
        ).config  # fmt: skip
        layer = train.layer_config(wrapper, config)
        made = head(mini_kimi, layer)
        assert expected == (
            layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim,
            layer.intermediate_size,
        )  # fmt: skip
        written = {
            "transformer_layer_config": layer.to_dict(),
            "draft_vocab_size": len(TRAINED),
            "eagle_aux_hidden_state_layer_ids": [3, 5, 6],
        }
        shapes = expected_shapes(written)
        there = {name: list(tensor.shape) for name, tensor in made.state_dict().items()}
        assert shapes.items() <= there.items()


@pytest.fixture(scope="module")
def int4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kimi.make(tmp_path_factory.mktemp("models") / "int4", int4=True)


def oracle(model: Path | str) -> verify.Oracle:
    return verify.Oracle(Verifier(str(model), trust_remote_code=True))


def with_weights(source: Path, target: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy whose second shard was changed."""
    shutil.copytree(source, target)
    shard = target / "model-00002-of-00002.safetensors"
    tensors = load_file(shard)
    change(tensors)
    save_file(tensors, shard, metadata={"format": "pt"})
    return target


def test_quantised_weights_are_not_recomputed(int4: Path, mini_kimi: Path, tmp_path: Path) -> None:
    def in_eight_bits(tensors: dict[str, Any]) -> None:
        name = "language_model.model.layers.7.self_attn.o_proj.weight"
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)

    fp8 = with_weights(mini_kimi, tmp_path / "fp8", in_eight_bits)
    for model, name in ((int4, "weight_packed"), (fp8, "7.self_attn.o_proj.weight")):
        with pytest.raises(UserError, match=rf"{name} is quantised.*--samples 0 checks"):
            oracle(model)


def test_nothing_is_recomputed_with_weights_that_are_not_the_verifiers(
    mini_kimi: Path, tmp_path: Path
) -> None:
    """transformers makes up what it does not find."""

    def otherwise(tensors: dict[str, Any]) -> None:
        tensors["language_model.closing.weight"] = tensors.pop("language_model.model.norm.weight")

    renamed = with_weights(mini_kimi, tmp_path / "renamed", otherwise)
    with pytest.raises(UserError, match=r"finds no model.norm.weight among its weights; --sampl"):
        oracle(renamed)


def test_a_verifier_of_the_hub_is_recomputed_with_its_weights(
    mini_kimi: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants
    from transformers.utils import hub

    commit = "0123456789" * 4
    cached = tmp_path / "models--org--mini"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(commit)
    (cached / "snapshots").mkdir()
    (cached / "snapshots" / commit).symlink_to(mini_kimi)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub, "TRANSFORMERS_CACHE", str(tmp_path), raising=False)
    monkeypatch.setattr(hub, "_is_offline_mode", True, raising=False)
    found, known = oracle("org/mini"), oracle(mini_kimi)
    ids = torch.arange(300, 320)
    assert all(map(torch.equal, found.states(ids, (2, 7)), known.states(ids, (2, 7))))


@pytest.mark.parametrize("packed", [False, True])
def test_embeddings_norm_and_lm_head_are_found_under_the_wrapper(
    packed: bool, core: Any, mini_kimi: Path, int4: Path
) -> None:
    """Also where the experts are packed to four bits: these three are not."""
    model = int4 if packed else mini_kimi
    text = kimi.language_model(mini_kimi, torch.float32)
    found = head(model)
    torch.testing.assert_close(found.embed_tokens.weight, text.model.embed_tokens.weight)
    states = torch.randn(5, kimi.HIDDEN)
    with torch.inference_mode():
        logits = text.lm_head(text.model.norm(states))
        torch.testing.assert_close(found.verifier_lm_head(states), logits[:, list(TRAINED)])
    chosen = targets.GreedyVerifier(Verifier(str(model), trust_remote_code=True)).tokens(states)
    assert chosen.tolist() == logits.argmax(dim=-1).tolist()


@pytest.mark.parametrize("kind", ["weight_packed", "qweight"])
def test_a_quantised_lm_head_is_not_replaced_by_the_embeddings(
    kind: str, core: Any, mini_kimi: Path, tmp_path: Path
) -> None:
    packed = shutil.copytree(mini_kimi, tmp_path / "packed")
    index = packed / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("lm_head.weight", f"lm_head.{kind}"))
    with pytest.raises(ValueError, match=rf"language_model.lm_head.{kind} is quantised"):
        head(packed)
    with pytest.raises(UserError, match="its lm_head is quantised"):
        targets.refuse(Verifier(str(packed), trust_remote_code=True))


def test_an_lm_head_in_eight_bits_is_refused_before_anything_is_extracted(
    core: Any, mini_kimi: Path, tmp_path: Path
) -> None:
    def in_eight_bits(tensors: dict[str, Any]) -> None:
        name = "language_model.lm_head.weight"
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)

    fp8 = with_weights(mini_kimi, tmp_path / "fp8", in_eight_bits)
    with pytest.raises(UserError, match=r"lm_head.weight is quantised \(F8_E4M3\); one in bf"):
        targets.refuse(Verifier(str(fp8), trust_remote_code=True))
    with pytest.raises(ValueError, match=r"lm_head.weight is torch.float8_e4m3fn, which needs a"):
        head(fp8)
