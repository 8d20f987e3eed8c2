"""What a verifier's files say of its language model, its code, and the head that it gets."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from spec_compat.errors import UserError
from spec_compat.pipeline.head.geometry import HeadGeometry
from spec_compat.pipeline.inputs.verifier import Verifier
from spec_compat.pipeline.inputs.weights import INDEX, Weights
from spec_compat.pipeline.run import plan as plans
from spec_compat.pipeline.run.config import RunConfig
from tests.kimi import TEXT_CONFIG
from tests.unit.pipeline_inputs import make_data, make_verifier, weights

PLAIN = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128}


def kimi(directory: Path, **config: Any) -> Path:
    return make_verifier(directory, text_config=TEXT_CONFIG, **config)


def test_latent_attention_gives_the_head_its_value_width(tmp_path: Path) -> None:
    """`head_dim`, as transformers saves it, is the rotary part alone."""
    whole = {**TEXT_CONFIG, "v_head_dim": 128, "head_dim": 16, "num_attention_heads": 8}
    found = Verifier(str(make_verifier(tmp_path, text_config=whole)))
    assert HeadGeometry.of(found) == HeadGeometry(8, 4, 128, 128)
    geometry = found.geometry
    assert (geometry.vocab_size, geometry.hidden_size, geometry.num_layers) == (163_840, 64, 8)
    silent = {key: value for key, value in whole.items() if key != "v_head_dim"}  # MiniCPM 3
    made = make_verifier(tmp_path / "silent", text_config=silent)
    assert HeadGeometry.of(Verifier(str(made))).head_dim == 64 // 8


@pytest.mark.parametrize(
    ("scaling", "tokens"),
    [
        ({"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 128}, 8192),
        ({"rope_type": "linear", "factor": 2.0}, 1024),
        ({"rope_type": "llama3", "factor": 8.0}, 512),
        ({"rope_type": "default"}, 512),
    ],
)
def test_the_context_is_what_vllm_makes_of_the_scaling(
    scaling: dict[str, Any], tokens: int, tmp_path: Path
) -> None:
    """In Kimi's config.json max_position_embeddings is the scaled one."""
    made = Verifier(str(make_verifier(tmp_path, rope_scaling=scaling)))
    assert made.geometry.max_length == tokens


def test_other_attention_gives_the_head_its_own(tmp_path: Path) -> None:
    made = Verifier(str(make_verifier(tmp_path, **PLAIN)))
    assert HeadGeometry.of(made) == HeadGeometry(4, 2, 16, 128)
    wide = make_verifier(tmp_path / "wide", **PLAIN, head_dim=32)
    assert HeadGeometry.of(Verifier(str(wide))).head_dim == 32


def test_a_config_that_is_silent_leaves_it_open(tmp_path: Path) -> None:
    assert HeadGeometry.of(Verifier(str(make_verifier(tmp_path)))) == HeadGeometry()


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["t.T", None]}}),
        ("preprocessor_config.json", {"auto_map": {"AutoImageProcessor": "p.P"}}),
    ],
)
def test_code_in_any_file_needs_trust(file: str, content: dict[str, Any], tmp_path: Path) -> None:
    model = make_verifier(tmp_path)
    (model / file).write_text(json.dumps(content))
    with pytest.raises(UserError, match=rf"\({file}\), which would be run; pass --trust-remote"):
        Verifier(str(model)).check()
    Verifier(str(model), trust_remote_code=True).check()


def test_code_that_transformers_does_without_needs_none(tmp_path: Path) -> None:
    """Phi-3 and others brought their classes before transformers had them."""
    model = make_verifier(tmp_path, auto_map={"AutoConfig": "configuration_llama.LlamaConfig"})
    tokens = {"chat_template": "{}", "auto_map": {"AutoTokenizer": ["t.T", None]}}
    for known, needed in (("LlamaTokenizer", ""), ("TikTokenTokenizer", "tokenizer_config.json")):
        text = json.dumps({**tokens, "tokenizer_class": known})
        (model / "tokenizer_config.json").write_text(text)
        assert Verifier(str(model)).brings_code == needed


def test_code_of_the_language_model_needs_trust(tmp_path: Path) -> None:
    text = {**TEXT_CONFIG, "auto_map": {"AutoConfig": "c.C"}}
    with pytest.raises(UserError, match=r"\(config.json\)"):
        Verifier(str(make_verifier(tmp_path, text_config=text))).check()


def indexed(directory: Path, **metadata: int) -> Path:
    """Two shards of 3 and 4 bytes, and the same weights once more."""
    model = make_verifier(directory)
    files = {"model-1.safetensors": 3, "model-2.safetensors": 4, "consolidated.safetensors": 7}
    for name, size in files.items():
        (model / name).write_bytes(b"w" * size)
    (model / "model.safetensors").unlink()
    weight_map = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    content = {"metadata": metadata, "weight_map": weight_map}
    (model / INDEX).write_text(json.dumps(content))
    return model


def test_weights_that_are_there_twice_are_weighed_once(tmp_path: Path) -> None:
    assert Verifier(str(indexed(tmp_path, total_size=5))).weight_bytes == 7
    assert Verifier(str(make_verifier(tmp_path / "plain"))).weight_bytes == len(weights(b"weights"))


@pytest.mark.parametrize("names", [("llm_config",), ("thinker_config", "text_config")])
def test_a_wrapper_may_call_its_language_model_otherwise(
    names: tuple[str, ...], tmp_path: Path
) -> None:
    """InternVL's own repositories, Qwen's Omni models; no class of transformers is asked."""
    whole: dict[str, Any] = {**PLAIN, "num_hidden_layers": 5, "hidden_size": 32, "vocab_size": 99}
    for name in reversed(names):
        whole = {name: whole, "vision_config": {"num_hidden_layers": 2, "hidden_size": 8}}
    whole |= {"architectures": ["Wrapper"], "model_type": "wrapper"}
    (make_verifier(tmp_path) / "config.json").write_text(json.dumps(whole))
    found = Verifier(str(tmp_path))
    geometry = found.geometry
    assert (geometry.num_layers, geometry.hidden_size, geometry.vocab_size) == (5, 32, 99)
    assert HeadGeometry.of(found) == HeadGeometry(4, 2, 8, 128)


def plan(tmp_path: Path, **options: Any) -> plans.Plan:
    model, data = kimi(tmp_path / "model"), make_data(tmp_path / "data.jsonl")
    given = {"model": str(model), "data": [str(data)], "output": tmp_path / "run", **options}
    return plans.make(RunConfig.model_validate(given))


def test_the_heads_geometry_is_in_the_plan(tmp_path: Path) -> None:
    config = plan(tmp_path).config
    assert (config.draft_heads, config.draft_kv_heads, config.draft_head_dim) == (4, 4, 64)
    assert config.draft_intermediate_size == 128
    asked = plan(tmp_path, draft_heads=6, draft_head_dim=32, draft_intermediate_size=96).config
    assert (asked.draft_heads, asked.draft_kv_heads, asked.draft_head_dim) == (6, 6, 32)
    assert asked.draft_intermediate_size == 96


def test_what_is_trained_of_the_head_is_in_the_plan(tmp_path: Path) -> None:
    """Of Kimi-K2.5 what docs/kimi.md has: the widths of its config.json, and the defaults."""
    widths = {"hidden_size": 7168, "intermediate_size": 18432, "num_attention_heads": 64,
              "num_key_value_heads": 64, "v_head_dim": 128, "num_hidden_layers": 61}  # fmt: skip
    data = str(make_data(tmp_path / "data.jsonl"))
    given = {"data": [data], "output": tmp_path / "run"}
    whole = make_verifier(tmp_path / "whole", text_config={**TEXT_CONFIG, **widths})
    found = plans.make(RunConfig.model_validate({**given, "model": str(whole)}))
    fc, attention, mlp = 3 * 7168**2, 8192 * 7168 * 7, 3 * 7168 * 18432
    assert found.trained_parameters == fc + attention + mlp + 32_000 * 7168 + 4 * 7168
    silent = make_verifier(tmp_path / "silent")
    assert (
        plans.make(RunConfig.model_validate({**given, "model": str(silent)})).trained_parameters
        == 0
    )


@pytest.mark.parametrize("width", [None, "64", [64]])
def test_a_width_that_is_no_number_is_one_line(width: Any, tmp_path: Path) -> None:
    model = make_verifier(tmp_path, **PLAIN, model_type="llama", hidden_size=width)
    with pytest.raises(UserError, match=r"hidden_size is .*, not a number"):
        Verifier(str(model)).check()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_head_dim": 20}, "--draft-head-dim 20: vLLM's attention takes multiples of 8"),
        ({"draft_head_dim": 264}, "--draft-head-dim 264"),
        ({"draft_heads": 6, "draft_kv_heads": 4}, "--draft-kv-heads 4: 6 heads cannot share them"),
    ],
)
def test_a_head_that_vllm_would_not_serve(
    options: dict[str, int], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        plan(tmp_path, **options)


@pytest.mark.parametrize("theta", [{"rope_theta": 50000.0}, {}])
def test_a_rope_theta_that_would_be_lost_is_refused(tmp_path: Path, theta: dict[str, Any]) -> None:
    """Shown in tests/live/test_rope_parameters.py."""
    import transformers

    written = {"rope_parameters": {"rope_type": "default", "rope_theta": 50000.0}, **theta}
    model = str(make_verifier(tmp_path, **PLAIN, **written))
    if theta or transformers.__version__ >= "5":
        Verifier(model).check()
        return
    with pytest.raises(UserError, match=r"rope_theta 50000 under rope_parameters .* take 10000; w"):
        Verifier(model).check()


def large(file: Path) -> Path:
    """Weights whose middle is far from both ends."""
    file.write_bytes(bytes(6 << 20))
    return file


def alter_middle(file: Path) -> None:
    with file.open("r+b") as stream:
        stream.seek(3 << 20)
        stream.write(b"\1")


def identity(model: Path, known: Any = None) -> str:
    made = Verifier(str(model))
    return made.digest(made.read_weights(known or {}))


def test_a_weight_in_the_middle_is_another_model_whatever_the_times_say(tmp_path: Path) -> None:
    model = make_verifier(tmp_path / "model")
    file = large(model / "model.safetensors")
    known, before = Verifier(str(model)).read_weights({}), identity(model)
    there = file.stat()
    time.sleep(0.02)  # a time of the file system is that of the last tick of the kernel
    alter_middle(file)
    os.utime(file, ns=(there.st_mtime_ns, there.st_mtime_ns))
    assert identity(model) != before
    assert identity(model, known) != before


def test_weights_that_stayed_are_read_once_and_elsewhere_they_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_verifier(tmp_path / "model")
    known, before = Verifier(str(model)).read_weights({}), identity(model)
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    assert identity(copy, known) == before
    monkeypatch.setattr(Weights, "of", lambda file: pytest.fail(f"{file} is read"))
    assert identity(model, known) == before


def test_weights_that_lie_there_once_more_are_not_read(tmp_path: Path) -> None:
    model = make_verifier(tmp_path / "model")
    (model / "consolidated.safetensors").write_text("the same, in another form")
    (model / INDEX).write_text('{"weight_map": {"a": "model.safetensors"}}')
    assert Verifier(str(model)).read_weights({}).keys() == {"model.safetensors"}


@pytest.mark.parametrize("name", ["modeling_x.py", "hf_quant_config.json", "more.safetensors"])
def test_other_code_is_another_model(name: str, tmp_path: Path) -> None:
    model = make_verifier(tmp_path / "model")
    before = identity(model)
    (model / name).write_text("{}")
    assert identity(model) != before


def test_a_download_is_its_commit_whatever_has_come_of_it_yet(tmp_path: Path) -> None:
    commit = "0123456789" * 4
    model = make_verifier(tmp_path / "models--a--b" / "snapshots" / commit)
    assert identity(model) == commit
    named_alike = make_verifier(tmp_path / "models" / "snapshots" / "step-10")
    before = identity(named_alike)
    (named_alike / "model.safetensors").write_text("other")
    assert identity(named_alike) != before


def test_reading_ends_when_it_is_stopped(tmp_path: Path) -> None:
    """Ctrl-C comes after the first file, and while others are read that take a minute or more."""
    model = make_verifier(tmp_path)
    for name in ("t", "u"):
        with (model / f"model.{name}.safetensors").open("wb") as stream:
            stream.truncate(1 << 37)  # a hole: no disk is used

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        Verifier(str(model)).read_weights({}, interrupt)
    assert time.monotonic() - begun < 20
