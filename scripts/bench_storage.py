#!/usr/bin/env python3
"""What each storage takes on the disk, and what a head learns from it: a run of the pipeline each.

    python -m scripts.bench_storage --epochs 3

The demo's verifier (SmolLM2-135M) and its own answers to the demo's prompts, the same seed in all
cases. On held-out rows: `accepted_k` is the share of positions at which the first k+1 drafted
tokens are all right, `length` the expected acceptance length, `loss_k` the loss of step k. What is
stored without loss gives the same head, byte for byte: `head` begins its SHA-256.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys

from scripts import measure

CASES = {
    "rows": (),
    "shards": ("--storage", "shards"),
    "zstd": ("--storage", "shards", "--storage-compression", "zstd"),
    "fp8": ("--storage", "shards", "--storage-dtype", "fp8"),
    "fp8-zstd": (
        "--storage", "shards", "--storage-dtype", "fp8", "--storage-compression", "zstd",
    ),
}  # fmt: skip
STEPS = 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=measure.count, default=3)
    parser.add_argument("--val-ratio", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=0)
    measure.scratch(parser)
    given = measure.options(parser, tuple(CASES))
    if given.case:
        run_case(given)
    records = measure.run_cases(given)
    learned = [f"{what}_{step}" for what in ("loss", "accepted") for step in range(STEPS)]
    measure.table(
        records, ("case", "rows", "tokens", "bytes_per_token", *learned, "length", "head")
    )
    known = {record["case"]: record for record in records if "failed" not in record}
    ratios = {}
    for case in known.keys() - {"rows"} if "rows" in known else ():
        for what in ("bytes_per_token", "loss_0", "accepted_0"):
            ratios[f"{case}/rows {what}"] = known[case][what] / known["rows"][what]
    measure.finish("storage", given, records, dict(sorted(ratios.items())))
    return any("failed" in record for record in records)


def run_case(given: argparse.Namespace) -> None:
    from examples.demo import __main__ as demo
    from examples.demo import answers, model

    verifier = model.verifier()
    options = {
        "model": verifier,
        "data": answers.conversations(verifier),
        "seq-length": demo.SEQ_LENGTH,
        "draft-vocab-size": demo.DRAFT_VOCAB,
        "total-seq-len": demo.BATCH_TOKENS,
        "lr": demo.LEARNING_RATE,
        "epochs": given.epochs,
        "val-ratio": given.val_ratio,
        "seed": given.seed,
        "output": given.scratch / f"storage-{given.case}",
    }
    shutil.rmtree(options["output"], ignore_errors=True)
    pairs = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    command = [sys.executable, "-m", "spec_compat.cli", "run-pipeline"]
    subprocess.run([*command, *pairs, *CASES[given.case]], check=True)
    stages = json.loads((options["output"] / "manifest.json").read_text())["stages"]
    extracted, trained = stages["extract"], stages["train"]["result"]
    head = (options["output"] / "head" / "model.safetensors").read_bytes()
    measure.record(
        rows=extracted["result"]["rows"],
        tokens=extracted["result"]["tokens"],
        bytes_per_token=extracted["result"]["bytes"] / extracted["result"]["tokens"],
        head=hashlib.sha256(head).hexdigest()[:8],
        **{f"loss_{step}": trained["validation"][f"loss_{step}"] for step in range(STEPS)},
        **{f"accepted_{step}": trained["acceptance"][step] for step in range(STEPS)},
        length=trained["expected_acceptance_length"],
    )
    shutil.rmtree(options["output"])
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
