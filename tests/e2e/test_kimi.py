"""Kimi-K2.5 in miniature, by one command: from conversations to a head, every wall in its place."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

import spec_compat
from spec_compat.cli import check
from spec_compat.pipeline import verify
from spec_compat.pipeline.head import releases
from spec_compat.pipeline.head.check import check_head
from tests import kimi
from tests.e2e.conftest import command, environment

pytestmark = [pytest.mark.live, pytest.mark.slow]

ROWS = 12
SERVED_HEAD = Path(__file__).with_name("served_head.py")
SERVED_ENVIRONMENT = {
    "SPEC_COMPAT_ENABLE": "serve/kimi-k25-eagle3",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
NEAR_TIE = 0.1
LAYER_IDS = (2, 4, 5, 7)
# bf16 leaves a median of 1.5 % with experts; the layer before is 30 % and more away.
MEDIAN, ANOTHER_LAYER = 0.02, 0.2
OPTIONS = (
    "--draft-vocab-size", "32000",
    "--seq-length", "128",
    "--epochs", "1",
    "--total-seq-len", "256",
    "--ttt-steps", "2",
)  # fmt: skip


@pytest.fixture(scope="session")
def talks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last of the rows says what only the template may say."""
    file = kimi.write_conversations(tmp_path_factory.mktemp("data") / "perfect.jsonl", ROWS)
    bad = {"conversations": [{"from": "gpt", "value": "<|im_end|>"}], "source": "x"}
    with file.open("a", encoding="utf-8") as stream:
        stream.write("\n" + json.dumps(bad) + "\n")
    return file


def run_pipeline(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command("run-pipeline", *map(str, arguments)),
        env=environment() | kimi.ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


@pytest.fixture(scope="session")
def finished(
    mini_kimi: Path, talks: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    output = tmp_path_factory.mktemp("runs") / "kimi"
    given = ("--model", mini_kimi, "--data", talks, "--output", output, *OPTIONS)
    done = run_pipeline(*given, "--trust-remote-code")
    assert done.returncode == 0, done.stderr + done.stdout
    return output, done.stdout


def rows(run: Path) -> list[dict[str, Any]]:
    files = sorted((run / "gen" / "perfect").glob("data_*.pt"))
    return [torch.load(file, weights_only=True) for file in files]


def test_without_trust_it_is_one_line(mini_kimi: Path, talks: Path, tmp_path: Path) -> None:
    done = run_pipeline("--model", mini_kimi, "--data", talks, "--output", tmp_path / "run")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "(config.json)" in line
    assert "--trust-remote-code" in line
    assert not (tmp_path / "run").exists()


def test_the_states_are_those_of_the_language_model(
    finished: tuple[Path, str], mini_kimi: Path
) -> None:
    model = kimi.language_model(mini_kimi, torch.bfloat16)
    extracted = rows(finished[0])
    assert len(extracted) == ROWS
    for row in extracted[:4]:
        with torch.inference_mode():
            output = model(row["input_ids"][None], output_hidden_states=True)
        for layer_id, state in zip(LAYER_IDS, row["hidden_states"], strict=True):
            assert state.shape == (len(row["input_ids"]), kimi.HIDDEN)
            ours = model.model.norm(state).detach() if layer_id == LAYER_IDS[-1] else state
            median, _ = verify.errors(ours, output.hidden_states[layer_id + 1][0])
            assert median < MEDIAN, (layer_id, median)
            assert verify.errors(state, output.hidden_states[layer_id][0])[0] > ANOTHER_LAYER


def test_verify_recomputes_rows_from_under_the_wrapper(
    finished: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """What the verifier's own code prints is not in the way."""
    assert check.rows(finished[0], 2, as_json=True) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert (found["rows"], found["recomputed"], found["problems"]) == (ROWS, 2, [])
    assert "a word from the model's own code" in said.err
    assert "recomputing" in said.err


def test_what_the_assistant_said_is_trained_on(
    finished: tuple[Path, str], mini_kimi: Path, talks: Path
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(mini_kimi, trust_remote_code=True)
    assert not tokenizer.is_fast
    said = {
        "".join(f"{turn['value']}<|im_end|>" for turn in row["conversations"]
                if turn["from"] == "gpt")
        for row in map(json.loads, filter(str.strip, talks.read_text("utf-8").splitlines()))
    }  # fmt: skip
    whole = 0
    for row in rows(finished[0]):
        ids = row["input_ids"][row["loss_mask"].bool()].tolist()
        text = tokenizer.decode(ids, spaces_between_special_tokens=False)
        assert any(full.startswith(text) for full in said), text
        whole += text in said
    assert whole >= ROWS // 3


def test_a_row_that_is_left_out_is_named_by_its_line(finished: tuple[Path, str]) -> None:
    (line,) = (finished[0] / "logs" / "reported-perfect.jsonl").read_text().splitlines()
    assert json.loads(line)["row"] == ROWS + 2


def test_the_head_is_sound_and_its_server_is_named(finished: tuple[Path, str]) -> None:
    run, printed = finished
    head, problems = check_head(run / "head")
    assert not problems
    assert head.config["draft_vocab_size"] == 32_000
    assert head.config["eagle_aux_hidden_state_layer_ids"] == [3, 5, 6]
    layer = head.config["transformer_layer_config"]
    widths = {"vocab_size": kimi.VOCABULARY, "num_attention_heads": 4, "num_key_value_heads": 4,
              "head_dim": 64, "intermediate_size": 128}  # fmt: skip
    assert {key: layer[key] for key in widths} == widths
    options = json.loads((run / "manifest.json").read_text())["options"]
    assert (options["draft_heads"], options["draft_head_dim"]) == (4, 64)
    architectures = head.config["speculators_config"]["verifier"]["architectures"]
    assert architectures == ["KimiK25ForConditionalGeneration"]
    (problem,) = releases.serving_problems(architectures, Version("0.16.0"), on_cpu=False)
    assert problem.startswith("this is vLLM 0.16.0; 0.18.0 is the first that serves Kimi")
    assert f"note: {problem}" in printed


def trained(run: Path) -> Any:
    """The head as the trainer has it, with the weights that were exported."""
    from safetensors.torch import load_file

    from spec_compat.pipeline import entry
    from spec_compat.pipeline.run.events import Events
    from spec_compat.pipeline.stages import training

    spec_compat.require(stage="train", scope="driver")
    model = training.draft_head(entry.job(run, Events())).eval()
    missing, unknown = model.load_state_dict(load_file(run / "head/model.safetensors"), False)
    assert not unknown
    assert not any(name.startswith(("layers.", "fc.", "norm.", "lm_head.")) for name in missing)
    return model.bfloat16()


def draft_logits(head: Any, row: dict[str, Any], sampled: int, layers: list[int]) -> torch.Tensor:
    """Float [32,000], of the token after the one that the verifier samples after this row."""
    seen: list[torch.Tensor] = []
    watching = head.lm_head.register_forward_hook(lambda *call: seen.append(call[2]))
    states = torch.cat([row["hidden_states"][layer] for layer in layers], dim=-1)[None]
    ids = torch.tensor([[*row["input_ids"][1:].tolist(), sampled]])
    with torch.inference_mode():
        head(states.bfloat16(), ids, ttt_steps=1)
    watching.remove()
    return seen[0][0, -1].float()


def test_vllm_drafts_with_the_head_where_it_is_asked_to(
    finished: tuple[Path, str], mini_kimi: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first draft after a prompt, on vLLM 0.16, is what the trainer's head makes of the
    states that were extracted; without the patch there is no server."""
    run = finished[0]
    chosen = rows(run)
    (tmp_path / "prompts.json").write_text(
        json.dumps([row["input_ids"].tolist() for row in chosen])
    )
    done = subprocess.run(
        [sys.executable, SERVED_HEAD, mini_kimi, run / "head", tmp_path / "prompts.json",
         tmp_path / "out.json"],
        env=environment() | kimi.ENVIRONMENT | SERVED_ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )  # fmt: skip
    assert "with: 2 graphs\n" in done.stdout, done.stderr
    assert "without: 1 graphs\n" in done.stdout
    assert done.returncode == 1
    assert "Eagle3 is only supported for ['llama', 'qwen'" in done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["layers"], found["placeholder"]) == ([3, 5, 6], 163_605)
    monkeypatch.setenv("SPEC_COMPAT_TRUST_REMOTE_CODE", "1")
    head = trained(run)
    tokens = torch.arange(len(head.d2t)) + head.d2t
    ours, others = [], []
    for row, sampled, drafted in zip(chosen, found["sampled"], found["drafted"], strict=True):
        for layers, gaps in (([0, 1, 2], ours), ([1, 2, 3], others)):
            logits = draft_logits(head, row, sampled, layers)
            gaps.append(float(logits.max() - logits[tokens == drafted]))
    assert max(ours) < NEAR_TIE, ours
    assert sum(gap == 0 for gap in ours) > sum(gap == 0 for gap in others)
