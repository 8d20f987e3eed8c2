"""The run that a head comes from, and what it knows for serving the head."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from spec_compat.pipeline.rows.index import Index
from spec_compat.pipeline.rows.row import RowRef
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
    prompts = _questions(layout, map(RowRef.parse, trained.held_out))
    own = 1.0 if trained.own_answers is None else trained.own_answers
    return Origin([ids for ids in prompts if ids], trained.acceptance, own, options)


def _questions(layout: Layout, held_out: Iterable[RowRef]) -> list[list[int]]:
    """Of each held-out row that is still stored the ids up to the first that is trained on."""
    from spec_compat.pipeline.rows import storage

    index = cache(lambda dataset: Index(layout.rows(dataset)))
    found = []
    for dataset, number in held_out:
        rows = index(dataset)
        if number in rows:
            row = storage.load(rows.directory / rows.holder(number), number)
            found.append(row.input_ids[: int(row.loss_mask.argmax())].tolist())
    return found
