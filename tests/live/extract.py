"""Extracts the states of several models, one after the other, in one process.

Reads {"models": [directories], "rows": ..., "layer_ids": ..., ...}. Writes into each directory
`states.pt` ([row][layer id] -> states, and what was found out about the layers) or `failure.txt`.
"""

import json
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

import spec_compat  # noqa: F401
from speculators.data_generation.vllm_hidden_states_generator import VllmHiddenStatesGenerator


def found(worker: Any) -> dict[str, str]:
    """What the capture in a vLLM worker knows about its model."""
    streams = worker._capture.streams
    return {"name": streams.name, "path": streams.path, "reading": streams.reading}


def extract(model: Path, rows: list[list[int]], **options: Any) -> None:
    generator = VllmHiddenStatesGenerator(model_path=str(model), **options)
    try:
        results = generator.generate(rows)
        facts = generator.executor.collective_rpc(found)[0]
    finally:
        generator.executor.shutdown()
    torch.save({**facts, "states": [row["hidden_states"] for row in results]}, model / "states.pt")


def main(request: Path) -> None:
    options = json.loads(request.read_text())
    for model in map(Path, options.pop("models")):
        (model / "states.pt").unlink(missing_ok=True)
        (model / "failure.txt").unlink(missing_ok=True)
        print(f"extracting {model.name}", flush=True)
        try:
            extract(model, **options)
        except Exception:  # the next model has its turn all the same
            (model / "failure.txt").write_text(traceback.format_exc())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
