"""The run that a head comes from, and what it knows for serving the head."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_compat.pipeline.run.layout import Layout
from spec_compat.pipeline.run.manifest import find
from spec_compat.pipeline.stages import STAGES, TRAIN

# What a run and vLLM call by the same name, and mean the same by.
LLM_OPTIONS = ("tensor_parallel_size", "gpu_memory_utilization", "trust_remote_code")


@dataclass(frozen=True)
class Origin:
    """What the run that a head comes from knows: prompts, the figures expected, vLLM's options.

    `prompts` are token ids. `own` is the share of the verifier's own choices in the text that the
    figures were measured on.
    """

    prompts: list[list[int]]
    expected: list[float]
    own: float
    options: dict[str, Any]


def origin(head: Path) -> Origin | None:
    """The run whose head lies in this directory; None when it is no run's."""
    layout = Layout(head.resolve().parent)
    if layout.head != head.resolve() or not layout.manifest.is_file():
        return None
    manifest = find(layout.root, STAGES)
    trained = manifest.result(TRAIN) if manifest is not None else None
    if manifest is None or trained is None:
        return None
    options = {name: manifest.options[name] for name in LLM_OPTIONS}
    prompts = [_question(layout.root / file) for file in trained.held_out]
    own = 1.0 if trained.own_answers is None else trained.own_answers
    return Origin([ids for ids in prompts if ids], trained.acceptance, own, options)


def _question(row: Path) -> list[int]:
    """The token ids of a held-out row up to the first that is trained on."""
    from spec_compat.pipeline.rows import storage

    content = storage.load(row)
    first = int(content["loss_mask"].argmax())
    ids: list[int] = content["input_ids"][:first].tolist()
    return ids
