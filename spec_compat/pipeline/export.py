"""The last checkpoint as a directory that vLLM is pointed at: weights and a true config.json."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

from spec_compat.pipeline import atomic
from spec_compat.pipeline.manifest import digest_of
from spec_compat.pipeline.stage import Job, Result

WEIGHTS = "model.safetensors"
AUX_LAYERS = 3
DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}

Tensors = dict[str, dict[str, Any]]


def run(job: Job) -> Result:
    """Write `head/`. Raises RuntimeError when weights and config do not belong together."""
    layout = job.layout
    epochs = sorted(int(d.name) for d in layout.checkpoints.iterdir() if d.name.isdigit())
    checkpoint = layout.checkpoints / str(epochs[-1])
    job.events.doing(f"exporting epoch {epochs[-1] + 1}")
    tensors = header(checkpoint / WEIGHTS)
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    check(config, tensors)
    verifier = config["speculators_config"]["verifier"]
    verifier["name_or_path"] = job.config.verifier_name or job.config.model
    # The trainer's dtype, and the Python code that it saves beside the weights, stay behind.
    config["dtype"] = DTYPES[tensors["fc.weight"]["dtype"]]
    config.pop("auto_map", None)
    with atomic.replacing_directory(layout.head) as directory:
        shutil.copyfile(checkpoint / WEIGHTS, directory / WEIGHTS)
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    files = sorted(layout.head.iterdir())
    outputs = {layout.relative(file): atomic.sha256(file) for file in files}
    size = sum(file.stat().st_size for file in files)
    return Result(digest_of(outputs), {"epoch": epochs[-1] + 1}, outputs, size)


def check(config: dict[str, Any], tensors: Tensors) -> None:
    """Raise RuntimeError where vLLM would fail to load the head, or load another one in silence."""
    layer = config["transformer_layer_config"]
    hidden, draft_size = layer["hidden_size"], config["draft_vocab_size"]
    expected = {
        "fc.weight": [hidden, AUX_LAYERS * hidden],
        "lm_head.weight": [draft_size, hidden],
        "embed_tokens.weight": [layer["vocab_size"], hidden],
        "d2t": [draft_size],
        "t2d": [layer["vocab_size"]],
    }
    for name, shape in expected.items():
        found = tensors.get(name, {}).get("shape")
        if found != shape:
            raise RuntimeError(f"{name} is {found}, the config asks for {shape}")
    ids = config["eagle_aux_hidden_state_layer_ids"]
    if not isinstance(ids, list) or len(ids) != AUX_LAYERS:
        raise RuntimeError(f"eagle_aux_hidden_state_layer_ids is {ids}, not {AUX_LAYERS} layers")


def header(file: Path) -> Tensors:
    """Shape and dtype of each tensor in a safetensors file."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        content: Tensors = json.loads(stream.read(length))
    content.pop("__metadata__", None)
    return content
