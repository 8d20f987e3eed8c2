"""`run-pipeline` on a tiny model: what it leaves behind, and that the manifest tells the truth."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import load_from_disk
from safetensors import safe_open

from spec_compat.pipeline.rows.index import Index
from tests import tiny_models
from tests.e2e.conftest import ROWS, Command, command, environment

pytestmark = [pytest.mark.live, pytest.mark.slow]

Finished = tuple[Path, str]
SHAPED = ("fc.weight", "lm_head.weight", "norm.weight")


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def manifest(run: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run / "manifest.json").read_text())
    return content


def results(run: Path) -> dict[str, str]:
    """Digest of every file that the same seed must give again."""
    patterns = ("gen/*/data_*.pt", "vocab_mapping/*", "checkpoints/*/*", "head/*")
    files = [file for pattern in patterns for file in sorted(run.glob(pattern))]
    return {file.relative_to(run).as_posix(): sha256(file) for file in files}


def rows(run: Path) -> list[dict[str, Any]]:
    return [
        torch.load(run / "gen" / "talks" / f"data_{index}.pt", weights_only=True)
        for index in range(ROWS)
    ]


def processes_of(run: Path) -> list[str]:
    """Command lines of processes that work on this run."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and process.name != str(os.getpid()):
            try:
                line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if str(run) in line:
                found.append(line)
    return found


def test_every_output_has_the_hash_and_the_size_of_the_manifest(finished: Finished) -> None:
    run, _ = finished
    stages = manifest(run)["stages"]
    assert list(stages) == ["prepare", "extract", "map", "train", "export"]
    for stage in stages.values():
        assert stage["finished"]
        assert stage["seconds"] > 0
        for name, digest in stage["result"]["outputs"].items():
            assert sha256(run / name) == digest, name
    listed = {name for stage in stages.values() for name in stage["result"]["outputs"]}
    for name, entry in Index(run / "gen" / "talks").files.items():
        assert sha256(run / "gen" / "talks" / name) == entry.sha256
        listed.add(f"gen/talks/{name}")
    ours = {"manifest.json", ".lock", "gen/talks/rows.index"}
    there = {file.relative_to(run).as_posix() for file in run.rglob("*") if file.is_file()}
    assert {name for name in there - ours if not name.startswith("logs/")} == listed
    for stage in ("map", "train", "export"):
        sizes = [(run / name).stat().st_size for name in stages[stage]["result"]["outputs"]]
        assert sum(sizes) == stages[stage]["result"]["bytes"]


def test_the_counts_are_those_of_the_rows(finished: Finished) -> None:
    run, _ = finished
    stages, extracted = manifest(run)["stages"], rows(run)
    tokens = sum(len(row["input_ids"]) for row in extracted)
    trainable = sum(int(row["loss_mask"].sum()) for row in extracted)
    assert stages["prepare"]["result"]["rows"] == ROWS
    assert stages["prepare"]["result"]["tokens"] == tokens
    assert stages["prepare"]["result"]["trainable_tokens"] == trainable
    assert stages["extract"]["result"]["rows_written"] == ROWS
    assert stages["extract"]["result"]["tokens"] == tokens
    sizes = [file.stat().st_size for file in (run / "gen" / "talks").glob("data_*.pt")]
    assert stages["extract"]["result"]["bytes"] == sum(sizes)
    train = stages["train"]["result"]
    assert train["rows"] + train["validation_rows"] == ROWS
    assert train["validation_rows"] >= 1


def test_ids_mask_and_states_of_a_row_belong_together(finished: Finished) -> None:
    run, _ = finished
    prepared = load_from_disk(str(run / "prepared" / "talks")).with_format(None)
    for row, expected in zip(rows(run), prepared, strict=True):
        length = len(expected["input_ids"])
        assert row["input_ids"].tolist() == expected["input_ids"]
        assert row["loss_mask"].tolist() == expected["loss_mask"]
        assert 0 < int(row["loss_mask"][1:].sum()) < length <= 96
        assert [tuple(state.shape) for state in row["hidden_states"]] == [(length, 64)] * 4
        assert {state.dtype for state in row["hidden_states"]} == {torch.bfloat16}


def test_data_config_is_that_of_speculators(finished: Finished) -> None:
    run, _ = finished
    config = json.loads((run / "gen" / "talks" / "data_config.json").read_text())
    assert config["hidden_states"]["layer_ids"] == [2, 4, 5, 7]
    assert config["data"]["num_samples"] == ROWS
    assert config["data"]["seed"] == 5


def test_the_mapping_covers_what_the_manifest_says(finished: Finished) -> None:
    run, _ = finished
    mapping, counts = run / "vocab_mapping", manifest(run)["stages"]["map"]["result"]
    d2t, t2d = np.load(mapping / "d2t.npy"), np.load(mapping / "t2d.npy")
    assert (d2t.dtype, t2d.dtype, len(d2t), len(t2d)) == (np.int64, np.bool_, 128, 512)
    assert (np.arange(128) + d2t == np.flatnonzero(t2d)).all()
    seen = torch.cat([row["input_ids"][row["loss_mask"].bool()] for row in rows(run)])
    assert counts["tokens"] == len(seen)
    assert counts["distinct_tokens"] == len(seen.unique())
    assert counts["coverage"] == pytest.approx(t2d[seen].mean())


def test_the_head_is_the_last_checkpoint_with_a_true_config(
    finished: Finished, tiny_llama: Path
) -> None:
    run, _ = finished
    head = run / "head"
    assert sorted(file.name for file in head.iterdir()) == ["config.json", "model.safetensors"]
    assert sha256(head / "model.safetensors") == sha256(run / "checkpoints/1/model.safetensors")
    config = json.loads((head / "config.json").read_text())
    verifier = json.loads((tiny_llama / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [3, 5, 6]
    assert config["norm_before_residual"] is True
    assert config["dtype"] == "bfloat16"
    assert config["draft_vocab_size"] == 128
    assert "auto_map" not in config
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": str(tiny_llama),
        "architectures": ["LlamaForCausalLM"],
    }
    layer = config["transformer_layer_config"]
    for key in (
        "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "head_dim",
        "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "rope_theta",
    ):  # fmt: skip
        assert layer[key] == verifier[key], key
    with safe_open(head / "model.safetensors", "pt") as weights:
        assert (weights.get_tensor("d2t").numpy() == np.load(run / "vocab_mapping/d2t.npy")).all()
        assert (weights.get_tensor("t2d").numpy() == np.load(run / "vocab_mapping/t2d.npy")).all()
        assert all(torch.isfinite(weights.get_tensor(name)).all() for name in SHAPED)


def test_the_patches_of_every_process_are_in_the_manifest(finished: Finished) -> None:
    run, _ = finished
    stages = manifest(run)["stages"]
    for stage in stages.values():
        assert not [patch for patch in stage["patches"] if patch["state"] in ("failed", "moved")]
    found = [p for p in stages["extract"]["patches"] if p["stage"] == "extract"]
    # vLLM may look at the model's class in one more process, which imports nothing of speculators.
    at_work = {patch["pid"] for patch in found if patch["state"] == "applied"}
    for scope, driver in (("driver", True), ("worker", False)):
        states = {
            patch["state"]
            for patch in found
            if patch["scope"] == scope
            and patch["pid"] in at_work
            and (patch["role"] == "driver") is driver
        }
        assert states - {"skipped", "not-needed"} == {"applied"}, scope
    assert stages["extract"]["environment"]["vllm"] == "0.16.0"


def test_the_closing_table_says_what_the_metrics_say(finished: Finished) -> None:
    run, printed = finished
    records = [json.loads(line) for line in (run / "logs/metrics.jsonl").read_text().splitlines()]
    last = [record["val"] for record in records if "val" in record][-1]
    train = manifest(run)["stages"]["train"]["result"]
    assert train["steps"] == sum("train" in record for record in records)
    for step in range(3):
        assert train["validation"][f"full_acc_{step}"] == last[f"full_acc_{step}_epoch"]
        assert f"{last[f'loss_{step}_epoch']:.3f}" in printed
    assert "cover" in printed
    for share in train["following_acceptance"]:
        assert f"{share:.1%}" in printed
    (line,) = (line for line in printed.splitlines() if "vllm serve" in line)
    assert shlex.split(line) == ["vllm", "serve", str(run / "head")]


def test_a_finished_run_is_not_done_again(cli: Command, finished: Finished) -> None:
    run, _ = finished
    before = results(run) | {"manifest": sha256(run / "manifest.json")}
    done = cli("run-pipeline", "--output", str(run))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("already done") == 5
    assert results(run) | {"manifest": sha256(run / "manifest.json")} == before


def test_killed_and_continued_it_gives_the_same_files(
    cli: Command, finished: Finished, given: list[str], tmp_path: Path
) -> None:
    kept: dict[Path, int] = {}
    while not 1 <= len(kept) < ROWS:  # else this process was too late, on a machine that is busy
        run = tmp_path / "killed"
        shutil.rmtree(run, ignore_errors=True)
        gen = run / "gen" / "talks"
        arguments = ["run-pipeline", *given, "--output", str(run)]
        process = subprocess.Popen(command(*arguments), env=environment())
        while not len(Index(gen)):
            assert process.poll() is None
            time.sleep(0.005)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 130
        assert not processes_of(run)
        # Files that the workers had not told of yet are written again.
        kept = {gen / name: entry.mtime_ns for name, entry in Index(gen).files.items()}

    done = cli("run-pipeline", "--output", str(run))
    assert done.returncode == 0, done.stderr
    assert "prepare  already done" in done.stdout
    assert manifest(run)["stages"]["extract"]["result"]["rows_written"] == ROWS - len(kept)
    assert {file: file.stat().st_mtime_ns for file in kept} == kept
    assert not list(gen.glob(".*"))
    assert results(run) == results(finished[0])


def test_a_stage_alone_redoes_what_its_options_change(
    cli: Command, finished: Finished, tmp_path: Path
) -> None:
    run = shutil.copytree(finished[0], tmp_path / "copy")
    refused = cli("run-pipeline", "--output", str(run), "--lr", "0.01")
    assert refused.returncode == 2
    assert "belongs to another run, whose --lr is 0.001, not 0.01" in refused.stderr
    assert results(run) == results(finished[0])

    done = cli("train", "--output", str(run), "--lr", "0.01", "--verifier-name", "org/tiny")
    assert done.returncode == 0, done.stderr
    before, after = results(finished[0]), results(run)
    changed = {name for name in before if before[name] != after[name]}
    assert {name.split("/")[0] for name in changed} == {"checkpoints", "head"}
    assert "checkpoints/0/model.safetensors" in changed
    config = json.loads((run / "head" / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == "org/tiny"


def test_a_row_that_is_gone_is_extracted_again(
    cli: Command, finished: Finished, tmp_path: Path
) -> None:
    run = shutil.copytree(finished[0], tmp_path / "copy")
    (run / "gen" / "talks" / "data_7.pt").unlink()
    done = cli("extract", "--output", str(run))
    assert done.returncode == 0, done.stderr
    assert manifest(run)["stages"]["extract"]["result"]["rows_written"] == 1
    assert results(run) == results(finished[0])
    again = cli("run-pipeline", "--output", str(run))
    assert again.stdout.count("already done") == 5


def test_another_dataset_leaves_the_rows_of_the_first_where_they_are(
    cli: Command, finished: Finished, conversations: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(finished[0], tmp_path / "copy")
    there = {file: file.stat().st_mtime_ns for file in (run / "gen" / "talks").glob("data_*.pt")}
    more = tiny_models.write_conversations(tmp_path / "more.jsonl", 4, first=ROWS)
    done = cli("prepare", "--output", str(run), "--data", str(conversations), "--data", str(more))
    assert done.returncode == 0, done.stderr
    done = cli("extract", "--output", str(run))
    assert done.returncode == 0, done.stderr
    counts = manifest(run)["stages"]["extract"]["result"]
    assert (counts["rows_written"], counts["rows"]) == (4, ROWS + 4)
    assert {file: file.stat().st_mtime_ns for file in there} == there


def test_rows_without_anything_to_learn_are_an_error_of_one_line(
    cli: Command, given: list[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    done = cli("prepare", *given, "--seq-length", "4", "--output", str(run))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert f"none of {ROWS} rows" in line
    assert not list((run / "prepared").iterdir())


def test_a_crash_is_one_line_with_the_log(
    cli: Command, given: list[str], tiny_llama: Path, tmp_path: Path
) -> None:
    broken = shutil.copytree(tiny_llama, tmp_path / "broken")
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "intermediate_size": 256}))
    run = tmp_path / "run"
    done = cli("run-pipeline", *given, "--model", str(broken), "--output", str(run))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: extract: ")
    log = run / "logs" / "extract.log"
    assert line.endswith(f"the log is {log}")
    assert "Traceback" in log.read_text()


def test_states_in_small_shards_train_a_head_and_are_verified(
    cli: Command, finished: Finished, tmp_path: Path
) -> None:
    run = shutil.copytree(finished[0], tmp_path / "copy")
    small = ("--storage", "shards", "--storage-dtype", "fp8", "--storage-compression", "zstd")
    extracted = cli("extract", "--output", str(run), *small)
    assert extracted.returncode == 0, extracted.stderr
    files = {file.suffix for file in (run / "gen" / "talks").iterdir()}
    assert files == {".safetensors", ".index", ".json"}

    done = cli("run-pipeline", "--output", str(run))
    assert done.returncode == 0, done.stderr
    before, after = manifest(finished[0])["stages"], manifest(run)["stages"]
    assert after["extract"]["result"]["bytes"] < 0.6 * before["extract"]["result"]["bytes"]
    assert after["map"]["result"]["outputs"] == before["map"]["result"]["outputs"]
    for step in range(3):
        name = f"loss_{step}"
        there, here = (s["train"]["result"]["validation"][name] for s in (before, after))
        assert 0 < abs(here - there) < 0.01 * there

    verified = cli("verify", str(run), "--samples", "4")
    assert verified.returncode == 0, verified.stdout + verified.stderr
