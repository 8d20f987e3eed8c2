"""What a server accepts is what training reported: SmolLM2, trained here and served by vLLM."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.conftest import Command

pytestmark = [pytest.mark.live, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
# About 6,500 tokens: enough to learn what a server can confirm, little enough to be trained here.
OPTIONS = (
    "--max-samples", "70",
    "--seq-length", "256",
    "--draft-vocab-size", "2048",
    "--epochs", "8",
    "--lr", "0.001",
    "--total-seq-len", "512",
)  # fmt: skip


@pytest.fixture(scope="module")
def serving() -> Path:
    """The interpreter of the environment that serves."""
    script = [sys.executable, str(ROOT / "scripts" / "bootstrap.py"), "serve"]
    built = subprocess.run(script, capture_output=True, text=True, check=False)
    assert built.returncode == 0, (built.stderr or built.stdout).strip().splitlines()[-1]
    return ROOT / ".venv-serve" / "bin" / "python"


@pytest.fixture(scope="module")
def trained(cli: Command, smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run on the verifier's own answers to the demo's prompts."""
    from examples.demo import answers

    run = tmp_path_factory.mktemp("served") / "run"
    data = answers.conversations(smollm2)
    done = cli(
        "run-pipeline", "--model", str(smollm2), "--data", str(data), "--output", str(run), *OPTIONS
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return run


def untrained(head: Path, directory: Path) -> Path:
    """The same head with the weights that a new one has but for embeddings, lm_head and norms."""
    shutil.copytree(head, directory)
    weights = load_file(head / "model.safetensors")
    torch.manual_seed(0)
    for name, tensor in weights.items():
        if name == "fc.weight" or name.endswith("_proj.weight"):
            weights[name] = torch.randn_like(tensor) * 0.02
    save_file(weights, directory / "model.safetensors")
    return directory


def test_the_server_accepts_what_training_reported(
    cli: Command, trained: Path, serving: Path, tmp_path: Path
) -> None:
    from spec_compat.pipeline.head import serve
    from spec_compat.pipeline.head.check import read_head
    from spec_compat.pipeline.origin import origin

    done = cli("check-head", str(trained / "head"), "--serve", "--python", str(serving), "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    for phase in ("without the head", "with the head"):  # minutes each, where no terminal shows it
        assert phase in done.stderr
    served, expected = found["served"], found["expected"]
    counts = json.loads((trained / "manifest.json").read_text())["stages"]["train"]["result"]
    assert expected == counts["acceptance"]
    assert found["own_answers"] == counts["own_answers"] > 0.9  # or it would be another text
    assert served["different"] == 0
    assert served["drafts"] > 200
    assert abs(served["acceptance"][0] - expected[0]) < 0.05, (served, expected)

    bare = untrained(trained / "head", tmp_path / "untrained")
    run = origin(trained / "head")
    assert run is not None
    asked = serve.request(read_head(bare), run.prompts, run.options)
    floor = serve.decode(serving, asked, bare)
    accepted = floor["num_accepted_tokens_per_pos"][0] / floor["num_drafts"]
    assert served["acceptance"][0] > accepted + 0.05, (served, floor)
