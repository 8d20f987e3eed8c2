"""One cell of the matrix: what this pair of releases does, as one line of JSON.

    python cell.py MODEL...

Every model's directory has `oracle.pt`: rows, layer ids, and the states that transformers computed.
With SPEC_COMPAT_DISABLE=1 it is the unpatched pair that is run.
"""

import json
import os
import sys
import time
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import spec_compat

GENERATOR = "speculators.data_generation.vllm_hidden_states_generator"
FROM_VLLM = (
    "CacheConfig",
    "MultiprocExecutor",
    "Request",
    "Scheduler",
    "SchedulerConfig",
    "get_kv_cache_config_from_groups",
)


def compare(model: Path) -> dict[str, Any]:
    """Extract the oracle's rows in one call, and compare every state of every row."""
    from speculators.data_generation.vllm_hidden_states_generator import VllmHiddenStatesGenerator

    oracle = torch.load(model / "oracle.pt", weights_only=True)
    rows, layer_ids = oracle["rows"], oracle["layer_ids"]
    generator = VllmHiddenStatesGenerator(str(model), layer_ids=layer_ids, max_model_len=512)
    results = generator.generate(rows)
    norm = load_file(model / "model.safetensors")["model.norm.weight"]
    wrong, errors = 0, [0.0]
    for row, result, expected in zip(rows, results, oracle["states"], strict=True):
        captured = [*result["hidden_states"][:-1], normed(result["hidden_states"][-1], norm)]
        mine = [relative(*pair) for pair in zip(captured, expected, strict=True)]
        same = result["input_ids"].tolist() == row and max(mine) < 0.3
        wrong += not same  # layers differ by 0.4, rows by more
        errors += mine if same else []
    generator.executor.shutdown()
    return {"rows": len(rows), "wrong": wrong, "error": max(errors)}


def normed(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The last layer's states as transformers gives them: after the final norm."""
    scale = torch.rsqrt(states.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    return (states.float() * scale).to(states.dtype) * weight


def relative(captured: torch.Tensor, expected: torch.Tensor) -> float:
    if captured.shape != expected.shape:
        return float("inf")
    return float((captured.float() - expected.float()).norm() / expected.float().norm())


def leftovers() -> list[str]:
    """Names that the generator has from vLLM, and that do not lead back there after undo()."""
    spec_compat.undo()
    module = vars(import_module(GENERATOR))
    return [name for name in FROM_VLLM if not module[name].__module__.startswith("vllm.")]


def workers(directory: str) -> int:
    """How many processes other than this one had the worker's patch in place."""
    pids = set()
    for file in Path(directory).glob("*.jsonl"):
        for line in file.read_text().splitlines():
            entry = json.loads(line)
            if entry.get("id") == "extract/capture" and entry.get("state") == "applied":
                pids.add(entry["pid"])
    return len(pids - {os.getpid()})


def main(models: list[Path]) -> None:
    started = time.monotonic()
    packages = ("torch", "transformers")
    found: dict[str, Any] = {name: metadata.version(name) for name in packages}
    found["models"] = {model.name: compare(model) for model in models}
    if directory := os.environ.get("SPEC_COMPAT_REPORT_DIR"):
        found["workers"] = workers(directory)
    found["leftovers"] = leftovers()
    found["python"] = sys.version.split()[0]
    found["seconds"] = round(time.monotonic() - started)
    print("CELL " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main([Path(path) for path in sys.argv[1:]])
