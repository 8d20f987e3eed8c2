"""What is decided before anything runs: geometry, layers, row length, names of datasets."""

from pathlib import Path
from typing import Any

import pytest

from spec_compat.errors import UserError
from spec_compat.pipeline.inputs.verifier import Verifier
from spec_compat.pipeline.rows import zstd
from spec_compat.pipeline.run import config, plan
from tests.unit.pipeline_inputs import make_data, make_verifier, weights


def planned(tmp_path: Path, geometry: dict[str, Any] | None = None, **flags: Any) -> plan.Plan:
    model = make_verifier(tmp_path / "model", **(geometry or {}))
    data = [str(make_data(tmp_path / "d.jsonl"))]
    options = {"model": str(model), "data": data, "output": tmp_path / "run", **flags}
    return plan.make(config.load(options))


def test_what_was_left_open_is_filled_in(tmp_path: Path) -> None:
    options = planned(tmp_path, {"num_hidden_layers": 30, "vocab_size": 49152}).config
    assert options.layer_ids == (2, 15, 27, 29)
    assert options.draft_vocab_size == 32000
    assert options.seq_length == 511


def test_a_small_vocabulary_is_drafted_whole(tmp_path: Path) -> None:
    assert planned(tmp_path).config.draft_vocab_size == 512


@pytest.mark.parametrize(
    ("asked", "limits", "expected"),
    [
        (None, {"max_position_embeddings": 8192}, 2048),
        (None, {"max_position_embeddings": 1024}, 1023),
        (512, {"max_position_embeddings": 512}, 511),
        (100, {"max_position_embeddings": 512}, 100),
        (4096, {"max_position_embeddings": None}, 4096),
        (900, {"rope_scaling": {"type": "linear", "factor": 2.0}}, 900),
        (
            900,
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 256,
                }
            },
            900,
        ),
    ],
)
def test_a_row_leaves_room_for_the_token_that_is_sampled(
    tmp_path: Path, asked: int | None, limits: dict[str, Any], expected: int
) -> None:
    assert planned(tmp_path, limits, seq_length=asked).config.seq_length == expected


def test_a_row_longer_than_the_context_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--seq-length 513: the verifier takes 512 tokens"):
        planned(tmp_path, seq_length=513)


@pytest.mark.parametrize(
    ("layer_ids", "fault"),
    [
        ((2, 4, 7), "four ids are needed, not 3"),
        ((2, 4, 5, 8), "8 is out of range, the verifier has layers 0 to 7"),
        ((-1, 4, 5, 7), "-1 is out of range"),
        ((2, 4, 4, 7), "different and ascending"),
        ((7, 5, 4, 2), "different and ascending"),
    ],
)
def test_layer_ids_are_checked(tmp_path: Path, layer_ids: tuple[int, ...], fault: str) -> None:
    with pytest.raises(UserError, match=fault):
        planned(tmp_path, layer_ids=layer_ids)


def test_the_default_layers_of_a_model_too_small_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="different and ascending"):
        planned(tmp_path, {"num_hidden_layers": 4})


def test_a_wrapper_is_read_through_its_text_config(tmp_path: Path) -> None:
    text = {"num_hidden_layers": 12, "hidden_size": 96, "vocab_size": 999}
    geometry = {"text_config": {**text, "max_position_embeddings": 100}}
    made = planned(tmp_path, geometry)
    assert (made.verifier.geometry.num_layers, made.verifier.geometry.hidden_size) == (12, 96)
    assert (made.verifier.geometry.vocab_size, made.config.seq_length) == (999, 99)


def test_code_of_the_model_needs_consent(tmp_path: Path) -> None:
    geometry = {"model_type": "unheard-of", "auto_map": {"AutoConfig": "configuration.Config"}}
    with pytest.raises(UserError, match="--trust-remote-code"):
        planned(tmp_path, geometry)
    assert planned(tmp_path, geometry, trust_remote_code=True)


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        ("model.safetensors", "no model.safetensors"),
        ("tokenizer_config.json", "no chat template"),
        ("config.json", "no config.json"),
    ],
)
def test_a_model_that_lacks_a_file_is_refused(tmp_path: Path, spoil: str, fault: str) -> None:
    model = make_verifier(tmp_path / "model")
    (model / spoil).unlink()
    with pytest.raises(UserError, match=fault):
        Verifier(str(model)).check()


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    model = make_verifier(tmp_path / "model")
    index = '{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}'
    (model / "model.safetensors.index.json").write_text(index)
    (model / "model-1.safetensors").touch()
    with pytest.raises(UserError, match=r"no model-2\.safetensors"):
        Verifier(str(model)).check()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (weights(b"weights")[:-1], "incomplete metadata, file not fully covered"),
        (weights(b"weights") + b"0", "incomplete metadata, file not fully covered"),
        (weights(b"weights")[:20], "invalid header length"),
        (b"", "header too small"),
        (b"version https://git-lfs.github.com/spec/v1", "header too large"),
    ],
)
def test_weights_that_are_cut_are_named_before_they_are_loaded(
    content: bytes, says: str, tmp_path: Path
) -> None:
    model = make_verifier(tmp_path / "model")
    (model / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError) as caught:
        Verifier(str(model)).check()
    line = f"--model {model}/model.safetensors: cut, or no safetensors file; copy it anew"
    assert str(caught.value) == f"{line} (Error while deserializing header: {says})"


def test_a_name_leaves_room_for_what_is_added_to_it() -> None:
    (long,) = plan.name_datasets((f"/a/{'ü' * 120}.jsonl",))
    assert long.name == "ü" * 50


def test_the_order_of_the_data_is_the_same_for_all(tmp_path: Path) -> None:
    model = make_verifier(tmp_path / "model")
    files = [make_data(tmp_path / name, rows) for rows, name in enumerate("cab", start=1)]
    files = [file.rename(file.with_suffix(".jsonl")) for file in files]
    given = {"model": str(model), "output": tmp_path / "run"}
    orders = (files, files[::-1])
    one, other = (
        plan.make(config.load({**given, "data": list(map(str, order))})) for order in orders
    )
    assert one == other


def test_datasets_of_one_name_get_different_directories() -> None:
    sources = ("/a/train.jsonl", "/b/train.jsonl", "sharegpt", "/c/my data.json")
    names = [dataset.name for dataset in plan.name_datasets(sources)]
    assert names == ["train", "train-2", "sharegpt", "my_data"]


@pytest.mark.parametrize(
    ("option", "value"), [("storage_dtype", "fp8"), ("storage_compression", "zstd")]
)
def test_only_shards_are_small(option: str, value: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{value}: only shards hold it; add --storage shards"):
        planned(tmp_path, **{option: value})


def test_zstd_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zstd, "MODULE", "backports.none")
    with pytest.raises(UserError, match=r"pip install backports\.zstd"):
        planned(tmp_path, storage="shards", storage_compression="zstd")


def test_the_bytes_of_a_token(tmp_path: Path) -> None:
    hidden = planned(tmp_path / "a").verifier.geometry.hidden_size
    assert planned(tmp_path / "a").bytes_per_token == 4 * hidden * 2
    fp8 = planned(tmp_path / "a", storage="shards", storage_dtype="fp8")
    assert fp8.bytes_per_token == 4 * (hidden + 4)
