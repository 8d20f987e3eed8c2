"""One cell of the matrix: what this pair of releases does, as one line of JSON.

    python cell.py MODEL...

Every model's directory has `oracle.pt`: rows, layer ids, and the states that transformers computed.
With SPEC_COMPAT_DISABLE=1 it is the unpatched pair that is run.
"""

import json
import multiprocessing
import os
import random
import sys
import time
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch

import spec_compat
import spec_compat.patches
from spec_compat import registry

ORDERS = 2
NOT_PATCHED = (
    "datasets",
    "transformers",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.executor.abstract",
)
(PATCHES,) = map(str, spec_compat.patches.__path__)
# What a module has imported that is there only because a patch provides it cannot be taken back.
LENT = {f"{PATCHES}/{p.id.replace('-', '_')}.py" for p in registry.patches() if p.provided}


def compare(model: Path) -> dict[str, Any]:
    """Extract the oracle's rows in one call, and compare every state of every row."""
    from speculators.data_generation.vllm_hidden_states_generator import VllmHiddenStatesGenerator

    oracle = torch.load(model / "oracle.pt", weights_only=True)
    rows, layer_ids = oracle["rows"], oracle["layer_ids"]
    generator = VllmHiddenStatesGenerator(str(model), layer_ids=layer_ids, max_model_len=512)
    results = generator.generate(rows)
    wrong, errors = 0, [0.0]
    for row, result, expected in zip(rows, results, oracle["states"], strict=True):
        mine = [relative(*pair) for pair in zip(result["hidden_states"], expected, strict=True)]
        same = result["input_ids"].tolist() == row and max(mine) < 0.3
        wrong += not same  # layers differ by 0.4, rows by more
        errors += mine if same else []
    generator.executor.shutdown()
    return {"rows": len(rows), "wrong": wrong, "error": max(errors)}


def relative(captured: torch.Tensor, expected: torch.Tensor) -> float:
    if captured.shape != expected.shape:
        return float("inf")
    return float((captured.float() - expected.float()).norm() / expected.float().norm())


def leftovers() -> list[str]:
    """Names in the modules of vLLM and speculators that lead to the code of a patch."""
    found = []
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in ("vllm", "speculators") or not isinstance(
            module, ModuleType
        ):
            continue
        for attr, value in list(vars(module).items()):
            inner = vars(value).items() if isinstance(value, type) else ()
            held = {attr: value, **{f"{attr}.{key}": raw for key, raw in inner}}
            found += [f"{name}:{key}" for key, raw in held.items() if is_ours(raw)]
    return found


def is_ours(value: Any) -> bool:
    function = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
    if not isinstance(function, FunctionType):
        return False
    file = function.__code__.co_filename
    return file.startswith(PATCHES) and file not in LENT


def in_another_order(seed: int) -> list[str]:
    """Import the patched modules in another order, undo patch after patch in yet another.

    What is wrong after it, a phrase each. Of two patches of one name, the lower stays until the
    upper is undone: that is what the second round is for.
    """
    chance = random.Random(seed)
    armed = [o.id for o in spec_compat.arm().outcomes if o.state == "armed"]
    modules = sorted({registry.get(patch_id).module for patch_id in armed})
    chance.shuffle(modules)
    for module in modules:
        if find_spec(module.partition(".")[0]):  # torchvision need not be there
            import_module(module)
    applied = [o.id for o in spec_compat.report().outcomes if o.state == "applied"]
    before = leftovers()
    chance.shuffle(applied)
    for patch_id in applied * len(applied):
        spec_compat.undo(patch_id)
    faults = [f"{name} is still a patch's" for name in leftovers()]
    return faults if applied and before else ["nothing was patched"]


def orders() -> list[str]:
    """What is wrong after some of the orders, each in a fork of a process that has vLLM."""
    for module in NOT_PATCHED:
        import_module(module)
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        return [
            fault for faults in pool.map(in_another_order, range(ORDERS), 1) for fault in faults
        ]


def patched_processes(directory: str) -> set[int]:
    """The processes other than this one that had the worker's patch in place."""
    pids = set()
    for file in Path(directory).glob("*.jsonl"):
        for line in file.read_text().splitlines():
            entry = json.loads(line)
            if entry.get("id") == "extract/capture" and entry.get("state") == "applied":
                pids.add(entry["pid"])
    return pids - {os.getpid()}


def main(models: list[Path]) -> None:
    started = time.monotonic()
    packages = ("torch", "transformers")
    found: dict[str, Any] = {name: metadata.version(name) for name in packages}
    directory = os.environ.get("SPEC_COMPAT_REPORT_DIR", "")
    found["orders"] = [] if os.environ.get("SPEC_COMPAT_DISABLE") else orders()
    forks = patched_processes(directory)
    found["models"] = {model.name: compare(model) for model in models}
    found["workers"] = len(patched_processes(directory) - forks)
    spec_compat.undo()
    found["leftovers"] = leftovers()
    found["python"] = sys.version.split()[0]
    found["seconds"] = round(time.monotonic() - started)
    print("CELL " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main([Path(path) for path in sys.argv[1:]])
