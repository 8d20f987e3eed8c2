#!/usr/bin/env python3
"""A miniature of Kimi-K2.5 with INT4 experts through the whole pipeline, on a GPU.

    python -m scripts.int4_experts --directory /tmp/int4 --json int4.json

The experts are packed as the published checkpoint's are (compressed-tensors, four bits, groups of
32) and have shapes that vLLM's Marlin kernel takes. Cases, each in a process of its own:
  mla    latent attention, as vLLM chooses its backend
  mha    the multi-head path of the same model, VLLM_MLA_DISABLE=1
Rows are extracted in both, and compared with transformers' DeepSeek-V3 on the unpacked weights. The
first case whose rows are there goes on: a head is trained, the run verified, the head served.
It needs no installation: a checkout, vLLM and speculators are enough.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

from scripts import measure

CASES = ("mla", "mha")
# Widths that the kernels for latent attention and for INT4 experts are made for.
GEOMETRY: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 1024, "moe_intermediate_size": 256,
    "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": 256, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "initializer_range": 0.03,
}  # fmt: skip
OPTIONS = (
    "--trust-remote-code", "--draft-vocab-size", "32000", "--seq-length", "256", "--epochs", "1",
    "--total-seq-len", "512", "--ttt-steps", "2", "--gpu-memory-utilization", "0.3",
)  # fmt: skip
ROWS = 24
COMPARED = 4
TELLING = re.compile(r"[^\n]*(?:Marlin|MLA|Using [A-Z_]+ attention|WNA16)[^\n]*")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, default=Path("/tmp/spec-compat-int4"))  # noqa: S108
    parser.add_argument("--bf16", action="store_true", help="experts that are not packed")
    parser.add_argument("--tiny", action="store_true", help="widths for a machine without a GPU")
    given = measure.options(parser, CASES)
    if given.case:
        return run_case(given.case, given.directory)
    from tests import kimi

    given.directory.mkdir(parents=True)
    kimi.make(given.directory / "model", int4=not given.bf16, **({} if given.tiny else GEOMETRY))
    kimi.write_conversations(given.directory / "talks.jsonl", ROWS)
    records = measure.run_cases(given)
    measure.finish("int4_experts", given, records, {})
    return any("failed" in record for record in records)


def run_case(case: str, directory: Path) -> int:
    run, model = directory / case, directory / "model"
    if case == "mha":
        os.environ["VLLM_MLA_DISABLE"] = "1"
    data = ("--model", model, "--data", directory / "talks.jsonl", "--output", run)
    status = command("run-pipeline", *data, *OPTIONS, "--to", "extract")
    log = run / "logs" / "extract.log"
    told = TELLING.findall(log.read_text()) if log.is_file() else []
    measure.record(what="vLLM said", lines=list(dict.fromkeys(told))[:12])
    if status:
        return status
    compare(run, model)
    if any((directory / other / "head").exists() for other in CASES):
        return 0
    status = command("run-pipeline", *data, *OPTIONS)
    command("verify", run, "--samples", "0")
    return status or command("check-head", run / "head", "--serve")


def command(*arguments: object) -> int:
    """Run a command of spec-compat; what it prints goes into the case's log."""
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "spec_compat.cli", *map(str, arguments)],
        env={**os.environ, "COLUMNS": "120"},
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = round(time.monotonic() - start, 1)
    print(*arguments, done.stdout, done.stderr, sep="\n", flush=True)
    said = [line.strip() for line in done.stdout.splitlines() if not re.search("[━─]", line)]
    errors = [line for line in done.stderr.splitlines() if "rror" in line]
    ends = [*said[-12:], *errors[-4:]]
    measure.record(what=arguments[0], seconds=seconds, status=done.returncode, ends=ends)
    return done.returncode


def compare(run: Path, model: Path) -> None:
    """Median errors of a token's states, ours and those of transformers in bf16.

    Both are against transformers in float32; `layer_before` is how far the layer before is off.
    """
    import torch

    from spec_compat.pipeline import verify
    from spec_compat.pipeline.rows import storage, store
    from spec_compat.pipeline.run.manifest import Manifest
    from tests import kimi

    layers = Manifest.model_validate_json((run / "manifest.json").read_text()).options["layer_ids"]
    stored_rows = list(islice(store.stored(run / "gen" / "talks"), COMPARED))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    oracle = kimi.language_model(model, torch.float32).to(device)
    norm = oracle.model.norm

    def states(ids: Any) -> Any:
        with torch.inference_mode():
            return oracle(ids[None].to(device), output_hidden_states=True).hidden_states

    def median(found: Any, right: Any) -> float:
        return round(verify.errors(found, right)[0], 5)

    rows = [storage.load(row.file, row.ref.number) for row in stored_rows]
    exact = [states(row.input_ids) for row in rows]
    ours, before = [], []
    for row, right in zip(rows, exact, strict=True):
        stored = list(row.hidden_states)
        before.append([median(s, right[k][0]) for k, s in zip(layers, stored, strict=True)])
        with torch.inference_mode():
            stored[-1] = norm(stored[-1].to(device).float())  # as transformers has the last layer's
        ours.append([median(s, right[k + 1][0]) for k, s in zip(layers, stored, strict=True)])
    oracle.bfloat16()
    for where, row, right, mine, far in zip(stored_rows, rows, exact, ours, before, strict=True):
        rounded = states(row.input_ids)
        theirs = [median(rounded[k + 1][0], right[k + 1][0]) for k in layers]
        tokens = len(row.input_ids)
        measure.record(
            what=str(where.ref),
            tokens=tokens,
            ours=mine,
            transformers_bf16=theirs,
            layer_before=far,
        )


if __name__ == "__main__":
    raise SystemExit(main())
