"""Convert the verifier, let it answer the prompts, run the pipeline on the answers.

python -m examples.demo [--output DIR] [--epochs N] [any other option of run-pipeline]
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

from examples.demo import STOPPED, answers, model
from spec_compat.errors import UserError
from spec_compat.pipeline.system import processes

DRAFT_VOCAB = 4096
SEQ_LENGTH = 512
EPOCHS = 3
# Few tokens: small batches and a high rate, or there are too few steps to learn anything.
BATCH_TOKENS = 512
LEARNING_RATE = 1e-3

STARTED = time.monotonic()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("runs/demo"), metavar="DIR")
    parser.add_argument("--epochs", type=int, default=EPOCHS, metavar="N")
    options, others = parser.parse_known_args()

    _say(f"verifier: {model.NAME}, converted once into {model.cache_root()}")
    verifier = model.verifier()
    _say(f"answers: {len(answers.prompts())} prompts, greedy, through vLLM; kept in the cache")
    data = answers.conversations(verifier)
    _say("pipeline: prepare, extract, map, train")
    processes.check_call(pipeline(verifier, data, options.output, options.epochs, others))

    python = Path(sys.prefix).with_name(".venv-serve") / "bin" / "python"
    if python.exists():
        _say("server: what it accepts of the head's drafts, beside what training expects")
        processes.check_call(_server(options.output, python))

    _say("done")
    print(serving(verifier, options.output.resolve() / "head"))
    return 0


def pipeline(verifier: Path, data: Path, output: Path, epochs: int, others: list[str]) -> list[str]:
    options = {
        "--model": verifier,
        "--data": data,
        "--output": output,
        "--seq-length": SEQ_LENGTH,
        "--draft-vocab-size": DRAFT_VOCAB,
        "--epochs": epochs,
        "--total-seq-len": BATCH_TOKENS,
        "--lr": LEARNING_RATE,
    }
    pairs = [str(word) for option in options.items() for word in option]
    return [_command(), "run-pipeline", *pairs, *others]


def _server(output: Path, python: Path) -> list[str]:
    return [_command(), "check-head", str(output / "head"), "--serve", "--python", str(python)]


def _command() -> str:
    return str(Path(sys.executable).with_name("spec-compat"))


def serving(verifier: Path, head: Path) -> str:
    """Where the head is, and the command that serves it."""
    config = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3}
    words = ["vllm", "serve", str(verifier), "--speculative-config", json.dumps(config)]
    return (
        f"\nThe draft head:  {head}\n"
        f"Serve it with:   {shlex.join(words)}\n"
        "                 (vLLM 0.16 speculates on GPUs only; its CPU build does from 0.32 on)"
    )


def _say(message: str) -> None:
    print(f"[demo, {time.monotonic() - STARTED:3.0f} s] {message}", flush=True)


def guarded() -> int:
    """The exit code; what its user can mend, or has stopped, is one line."""
    try:
        return main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as error:
        return error.returncode  # the step has said what was wrong
    except KeyboardInterrupt:
        print(STOPPED, file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(guarded())
