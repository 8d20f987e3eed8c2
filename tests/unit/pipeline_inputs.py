"""Inputs for tests of the pipeline's checks: no weights, no vLLM, no speculators behind them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from spec_compat.pipeline.run.events import Events
from spec_compat.pipeline.stages.export import Exported
from spec_compat.pipeline.stages.extract import Extracted
from spec_compat.pipeline.stages.map import Mapped
from spec_compat.pipeline.stages.prepare import Prepared
from spec_compat.pipeline.stages.train import Trained

TURNS = [{"from": "human", "value": "a?"}, {"from": "gpt", "value": "b."}]


# What each stage of a small run might have made.
PREPARED = Prepared(digest="rows", outputs={}, rows=3, tokens=30, trainable_tokens=9)
MADE = {
    "prepare": PREPARED,
    "extract": Extracted(digest="extract", outputs={}, rows=0, layer_ids=(2, 4, 5, 7)),
    "map": Mapped(
        digest="map",
        outputs={},
        tokens=9,
        distinct_tokens=4,
        draft_vocab_size=512,
        target_vocab_size=512,
        padded=508,
        coverage=1.0,
    ),
    "train": Trained(
        digest="train",
        outputs={},
        rows=2,
        validation_rows=1,
        tokens=30,
        epochs=20,
        steps=20,
        ttt_steps=3,
        total_seq_len=128,
        validation={"loss_0": 1.0},
        acceptance=[0.5],
        expected_acceptance_length=1.5,
        held_out=["gen/d/data_0.pt"],
    ),
    "export": Exported(digest="export", outputs={}, epoch=20),
}


def make_verifier(directory: Path, **config: Any) -> Path:
    """A directory that passes for a model as long as nobody loads it."""
    directory.mkdir(parents=True, exist_ok=True)
    content = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 8,
        "hidden_size": 64,
        "vocab_size": 512,
        "max_position_embeddings": 512,
        **config,
    }
    (directory / "config.json").write_text(json.dumps(content))
    (directory / "model.safetensors").write_bytes(weights(b"weights"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{}"}))
    return directory


def weights(content: bytes) -> bytes:
    """A safetensors file of one tensor."""
    tensor = {"dtype": "U8", "shape": [len(content)], "data_offsets": [0, len(content)]}
    header = json.dumps({"w": tensor}).encode()
    return len(header).to_bytes(8, "little") + header + content


def make_data(file: Path, rows: int = 3) -> Path:
    """Conversations, one a line."""
    file.write_text((json.dumps({"conversations": TURNS}) + "\n") * rows)
    return file


def make_releases(directory: Path, vllm: str = "0.16.0", speculators: str = "0.3.0") -> Path:
    """Empty packages with these releases, to go in front on the path."""
    for name, release in (("vllm", vllm), ("speculators", speculators)):
        (directory / name).mkdir(parents=True)
        (directory / name / "__init__.py").touch()
        metadata = directory / f"{name}-{release}.dist-info"
        metadata.mkdir()
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {release}\n"
        (metadata / "METADATA").write_text(text)
    (directory / "vllm" / "_version.py").write_text(f"__version__ = version = '{vllm}'\n")
    return directory


class Notes(Events):
    """Events that keep what is told."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)
