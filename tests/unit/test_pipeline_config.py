"""Options: where they come from, which wins, and what is said when one is wrong."""

from pathlib import Path

import pytest

from spec_compat.errors import UserError
from spec_compat.pipeline.run import config

GIVEN = {"model": "m", "data": ["d.jsonl"], "output": "run"}


def toml(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults_are_those_of_speculators_scripts() -> None:
    options = config.load(GIVEN)
    assert (options.epochs, options.lr, options.ttt_steps, options.batch_size) == (20, 1e-4, 3, 256)
    assert (options.gpu_memory_utilization, options.noise_std, options.val_ratio) == (
        0.8,
        0.05,
        0.1,
    )


def test_flags_win_over_the_file_and_the_file_over_the_run(tmp_path: Path) -> None:
    file = toml(tmp_path / "run.toml", "epochs = 2\nseed = 2\nlr = 0.5\n")
    earlier = {**GIVEN, "epochs": 1, "seed": 1, "lr": 0.1, "batch_size": 1}
    options = config.load({"epochs": 3}, file, earlier)
    assert (options.epochs, options.seed, options.lr, options.batch_size) == (3, 2, 0.5, 1)


def test_the_file_may_write_dashes_and_one_data(tmp_path: Path) -> None:
    text = 'model = "m"\ndata = "d.jsonl"\noutput = "run"\nlayer-ids = [1, 2, 3, 4]\n'
    options = config.load({}, toml(tmp_path / "run.toml", text))
    assert (options.data, options.layer_ids) == (("d.jsonl",), (1, 2, 3, 4))


@pytest.mark.parametrize("written", ["2,4,5,7", "2 4 5 7", "[2, 4, 5, 7]"])
def test_layer_ids_are_read_from_text(written: str) -> None:
    assert config.load({**GIVEN, "layer_ids": written}).layer_ids == (2, 4, 5, 7)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("epoch = 3", "no option is called 'epoch'; did you mean epochs?"),
        ("epochs = ", "not TOML"),
        ("lr = -1.0", "run.toml: lr: input should be greater than 0, not -1.0"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(UserError, match=r"run\.toml") as caught:
        config.load(GIVEN, toml(tmp_path / "run.toml", text))
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"epochs": 0}, "--epochs: input should be greater than or equal to 1, not 0"),
        ({"total_seq_len": 200}, "--total-seq-len: input should be a multiple of 128, not 200"),
        ({"gpu_memory_utilization": 1.5}, "--gpu-memory-utilization"),
        ({"layer_ids": "2,x,5,7"}, "--layer-ids"),
        ({"model": None}, "--model"),
    ],
)
def test_a_wrong_flag_is_named(flags: dict[str, object], expected: str) -> None:
    with pytest.raises(UserError) as caught:
        config.load({**GIVEN, **flags})
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ("500GB", 500 * 10**9), ("2.5 TB", 2500 * 10**9), ("800M", 800 * 10**6), ("10k", 10_000),
        ("12", 12), ("100kB", 100_000), (500, 500),
    ],
)  # fmt: skip
def test_sizes_are_read_as_they_are_written(written: str | int, size: int) -> None:
    options = config.load({**GIVEN, "max_disk": written})
    assert options.max_disk == size
    assert config.load({}, earlier=options.model_dump(mode="json")) == options


@pytest.mark.parametrize("written", ["lots", "-5GB", "5XB", "", "1,000GB", "500 GB each"])
def test_what_is_no_size_is_named(written: str) -> None:
    with pytest.raises(UserError, match=f"--max-disk: .*, not '{written}'"):
        config.load({**GIVEN, "max_disk": written})


def test_what_is_missing_is_explained() -> None:
    with pytest.raises(UserError, match="--model is missing: Verifier"):
        config.load({"data": ["d.jsonl"], "output": "run"})


def test_the_options_of_a_run_survive_the_manifest() -> None:
    options = config.load({**GIVEN, "layer_ids": "2,4,5,7", "verifier_name": "org/name"})
    assert config.RunConfig.model_validate(options.model_dump(mode="json")) == options


def test_a_byte_order_mark_before_the_options_is_no_fault(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_bytes(b"\xef\xbb\xbfepochs = 3\r\n")
    assert config.read_toml(file) == {"epochs": 3}
