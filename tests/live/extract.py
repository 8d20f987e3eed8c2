"""Extracts the states of several models, one after the other, in one process.

Reads {"models": [directories], "rows": ..., "layer_ids": ..., ...}; writes `states.pt` beside each
model's files, or `failure.txt`.
"""

import gc
import json
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

import spec_compat  # noqa: F401
from speculators.data_generation.vllm_hidden_states_generator import VllmHiddenStatesGenerator


def found(worker: Any) -> Any:
    streams = worker._capture.streams
    return {
        "path": getattr(streams, "path", None),
        "reading": getattr(streams, "reading", None),
        "class": type(worker.model_runner.model).__name__,
    }


def extract(model: str, rows: list[list[int]], **options: Any) -> None:
    generator = VllmHiddenStatesGenerator(model_path=model, **options)
    try:
        results = generator.generate(rows)
        (facts,) = generator.executor.collective_rpc(found)
        torch.save(
            {"states": [row["hidden_states"] for row in results], **facts},
            Path(model) / "states.pt",
        )
    finally:
        generator.executor.shutdown()


def main(request: Path) -> None:
    options = json.loads(request.read_text())
    for model in options.pop("models"):
        try:
            extract(model, **options)
        except Exception:
            Path(model, "failure.txt").write_text(traceback.format_exc())
        gc.collect()
        print(f"done {model}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
