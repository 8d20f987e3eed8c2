"""Bad input gets one line and exit code 2, and leaves nothing behind."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from spec_compat.cli.app import app
from tests.kimi import TEXT_CONFIG
from tests.unit.pipeline_inputs import make_data, make_releases, make_verifier

Invoke = Callable[..., Result]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Model, data, and the supported releases; a test spoils one of them."""
    make_verifier(tmp_path / "model")
    make_data(tmp_path / "d.jsonl")
    monkeypatch.syspath_prepend(make_releases(tmp_path / "site"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str, model: str = "model", data: str = "d.jsonl") -> Result:
    given = ["run-pipeline", "--model", model, "--data", data, "--output", "run"]
    return CliRunner().invoke(app, [*given, *arguments])


def assert_refused(result: Result, *expected: str) -> None:
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    for text in expected:
        assert text in line
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("nowhere/at/all", "--model nowhere/at/all: no such directory"),
        ("./nowhere", "--model ./nowhere: no such directory"),
        ("no-such/model", "--model no-such/model: no such directory, and not available"),
        ("d.jsonl", "--model d.jsonl: this is a file, not a model's directory"),
        ("~nobody-of-that-name/x", "--model ~nobody-of-that-name/x: no such directory"),
        ("two\nlines", r"--model two\nlines: no such directory"),
        ("n" * 300, "file name too long"),
        ("site", "--model site: no config.json"),
    ],
)
def test_a_missing_model(root: Path, model: str, expected: str) -> None:
    assert_refused(run(model=model), expected)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("nowhere.jsonl", "--data nowhere.jsonl: no such file"),
        ("nowhere", "--data nowhere: neither a .json or .jsonl file nor sharegpt, ultrachat"),
        ("site", "--data site: neither"),
        ("~nobody-of-that-name/x.jsonl", "--data ~nobody-of-that-name/x.jsonl: no such file"),
        (f"{'n' * 300}.jsonl", "file name too long"),
    ],
)
def test_missing_data(root: Path, data: str, expected: str) -> None:
    assert_refused(run(data=data), expected)


def test_data_that_is_given_twice(root: Path) -> None:
    """What is held out of the one would be trained on in the other."""
    assert_refused(run("--data", "./d.jsonl"), f"--data {root / 'd.jsonl'}: given twice")


def test_a_line_that_does_not_parse(root: Path) -> None:
    with (root / "d.jsonl").open("a") as stream:
        stream.write('{"conversations": [}\n')
    assert_refused(run(), "d.jsonl:4: not JSON")


def test_no_usable_conversation(root: Path) -> None:
    (root / "d.jsonl").write_text(json.dumps({"text": "no turns"}) + "\n")
    assert_refused(run(), "d.jsonl: no usable conversation (1 x no list under conversations")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--layer-ids", "2,4,5,8"), "--layer-ids 2,4,5,8: 8 is out of range"),
        (("--layer-ids", "2,4,5"), "--layer-ids 2,4,5: four ids are needed, not 3"),
        (("--layer-ids", "2,2,5,7"), "--layer-ids 2,2,5,7: the ids must be different"),
        (("--layer-ids", "two"), "--layer-ids"),
        (("--draft-vocab-size", "513"), "--draft-vocab-size 513: the verifier has only 512 tokens"),
        (("--seq-length", "1000"), "--seq-length 1000: the verifier takes 512 tokens"),
        (("--output", "n" * 300), "file name too long"),
        (("--seed", str(2**64)), "--seed: input should be less than 4294967296"),
        (("--assistant-pattern", "(a"), "--assistant-pattern: a regular expression (missing )"),
        (("--assistant-pattern", "a"), "--assistant-pattern: a regular expression with the"),
        (("--epochs", "0"), "--epochs: input should be greater than or equal to 1"),
        (("--sink-buffers", "1"), "--sink-buffers: input should be greater than or equal to 2"),
        (("--sink-buffers", "two"), "--sink-buffers: input should be a valid integer"),
        (("--batch-size", "2.5"), "--batch-size: input should be a valid integer"),
        (("--lr", "fast"), "--lr: input should be a valid number"),
        (("--noise-std", "inf"), "--noise-std: input should be a finite number"),
        (("--storage", "row"), "--storage: input should be 'rows' or 'shards', not 'row'"),
        (("--storage-dtype", "fp8"), "--storage-dtype fp8: only shards hold it; add --storage"),
        (("--storage-compression", "zstd"), "--storage-compression zstd: only shards hold it"),
        (("--from", "bake"), "--from bake: no such stage; there are prepare, extract, map, train"),
        (("--from", "train", "--to", "map"), "--from train comes after --to map"),
        (("--from", "map"), "prepare has not been done yet"),
        (("--config", "nowhere.toml"), "--config nowhere.toml: No such file"),
    ],
)
def test_wrong_options(root: Path, arguments: tuple[str, ...], expected: str) -> None:
    assert_refused(run(*arguments), expected)


def test_an_unknown_key_in_the_file(root: Path) -> None:
    (root / "run.toml").write_text("sequence_length = 5\n")
    assert_refused(run("--config", "run.toml"), "run.toml: no option is called 'sequence_length'")


def test_an_option_that_is_spelt_in_two_ways(root: Path) -> None:
    (root / "run.toml").write_text("seq-length = 64\nseq_length = 32\n")
    expected = "--config run.toml: 'seq_length' is there twice, with - and with _"
    assert_refused(run("--config", "run.toml"), expected)


@pytest.mark.parametrize("option", ["model", "data", "output", "hf-cache-dir"])
def test_a_path_that_is_none(option: str, root: Path) -> None:
    """A shell cannot write it, a file can."""
    given = {"model": "model", "data": "d.jsonl", "output": "run"} | {option: "a\0b"}
    lines = [f"{name} = {json.dumps(value)}\n" for name, value in given.items()]
    (root / "run.toml").write_text("".join(lines))
    result = CliRunner().invoke(app, ["run-pipeline", "--config", "run.toml"])
    assert_refused(result, r"'a\x00b': a path cannot have a NUL byte")


@pytest.mark.parametrize("missing", ["--model", "--data", "--output"])
def test_a_missing_option(root: Path, missing: str) -> None:
    given = ["--model", "model", "--data", "d.jsonl", "--output", "run"]
    at = given.index(missing)
    result = CliRunner().invoke(app, ["run-pipeline", *given[:at], *given[at + 2 :]])
    assert_refused(result, f"{missing} is missing")


@pytest.mark.parametrize(
    ("releases", "expected"),
    [
        ({"vllm": "0.10.2"}, "vllm 0.10.2 is older than 0.11.0, the oldest known"),
        ({"speculators": "0.5.0"}, "speculators 0.5.0 has no in-process generator"),
    ],
)
def test_a_release_that_cannot_run(
    releases: dict[str, str], expected: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(make_releases(root / "other", **releases))
    assert_refused(run(), expected)


def test_an_output_that_is_no_run(root: Path) -> None:
    (root / "work").mkdir()
    (root / "work" / "thesis.tex").touch()
    assert_refused(run("--output", "work"), "not empty, and not the directory of a run")
    assert [path.name for path in (root / "work").iterdir()] == ["thesis.tex"]


def test_an_output_of_another_run(root: Path) -> None:
    from spec_compat.pipeline.run import config, manifest, plan
    from spec_compat.pipeline.run.layout import Layout

    options = {"model": "model", "data": ["d.jsonl"], "output": "work"}
    (root / "work").mkdir()
    manifest.begin(plan.make(config.load(options))).save(Layout(root / "work"))
    before = (root / "work" / "manifest.json").read_bytes()
    result = run("--output", "work", "--seed", "7")
    assert_refused(result, "belongs to another run, whose --seed is 0, not 7")
    assert (root / "work" / "manifest.json").read_bytes() == before
    assert len(list((root / "work").iterdir())) == 1


def test_a_dry_run_prints_the_plan_and_makes_nothing(root: Path) -> None:
    before = sorted(root.rglob("*"))
    result = run("--dry-run")
    assert result.exit_code == 0, result.output
    for text in ("prepare, extract, map, train", "3 of 3 rows", "2, 4, 5, 7", "512 bytes each"):
        assert text in result.output
    assert sorted(root.rglob("*")) == before


def test_a_dry_run_says_when_the_head_cannot_be_served(root: Path) -> None:
    """Before a week of extraction, not after it."""
    kimi = ["KimiK25ForConditionalGeneration"]
    make_verifier(root / "kimi", architectures=kimi, text_config=TEXT_CONFIG)
    result = run("--dry-run", model="kimi")
    assert "4 heads of 64, 4 of keys and values, MLP of 128" in result.output
    assert f"serving      this is vLLM 0.16.0; 0.18.0 is the first that serves {kimi[0]}" in (
        result.output
    )


def test_what_is_unusual_of_a_run_is_said_before_it(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in the stages' logs alone, where nobody looks."""
    monkeypatch.syspath_prepend(make_releases(root / "newer", vllm="0.99.0"))
    monkeypatch.setenv("SPEC_COMPAT_DISABLE", "train/verifier-norm,extract/capture")
    monkeypatch.setenv("SPEC_COMPAT_ENABLE", "serve/kimi-k25-eagle3")
    assert run("--dry-run").stderr.splitlines() == [
        "warning: vllm 0.99.0 is newer than 0.33.0, the newest known: "
        "it runs if every probe agrees",
        "warning: disabled by SPEC_COMPAT_DISABLE: extract/capture, train/verifier-norm",
        "warning: enabled by SPEC_COMPAT_ENABLE: serve/deepseek-eagle3, serve/eagle3-config, "
        "serve/kimi-k25-eagle3",
    ]
    monkeypatch.setenv("SPEC_COMPAT_DISABLE", "train/verifer-norm")
    assert_refused(run("--dry-run"), "train/verifer-norm", "train/verifier-norm")
