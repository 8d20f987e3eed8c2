"""What a stage is given, and what it hands back."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from spec_compat.pipeline.inputs.verifier import Verifier
from spec_compat.pipeline.run.config import ResolvedConfig
from spec_compat.pipeline.run.events import Events
from spec_compat.pipeline.run.layout import Layout
from spec_compat.pipeline.run.manifest import Manifest
from spec_compat.pipeline.run.plan import Dataset

# In what vLLM says of a worker that raised something, which it then ends itself by SIGTERM.
TOLD_OF = "root cause"


@dataclass(frozen=True)
class Job:
    """What a stage is given."""

    config: ResolvedConfig
    layout: Layout
    datasets: tuple[Dataset, ...]
    manifest: Manifest
    events: Events

    @cached_property
    def verifier(self) -> Verifier:
        return Verifier(self.config.model, self.config.trust_remote_code)


@dataclass(frozen=True)
class Result:
    """What a stage hands back: see StageRecord for the fields."""

    digest: str
    counts: dict[str, Any]
    outputs: dict[str, str]
    bytes: int = 0
    parts: dict[str, str] = field(default_factory=dict)
