"""manifest.json: what a run is made from, what each stage did, and the proof of its patches."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ConfigDict, SerializeAsAny

import spec_compat
from spec_compat.errors import UserError
from spec_compat.pipeline.inputs.weights import Weights
from spec_compat.pipeline.run import fingerprints
from spec_compat.pipeline.run.config import RunConfig
from spec_compat.pipeline.run.layout import Layout
from spec_compat.pipeline.run.plan import Plan
from spec_compat.pipeline.system import atomic

if TYPE_CHECKING:
    from spec_compat.pipeline.run.stage import Stage

SCHEMA = 2
REMEDY = "restore it, or choose another directory"


class Result(BaseModel):
    """What a stage made: it is sent to the runner and stored in the manifest as it is.

    `outputs` maps files, relative to the run directory, to their SHA-256; `bytes` is the size of
    all files; `digest` is that of all that a later stage reads, `parts` that of each dataset's
    part where it has parts. Each stage adds figures of its own; the closing table shows `rows`,
    `tokens` and `tokens_per_second`.
    """

    model_config = ConfigDict(frozen=True)

    digest: str
    outputs: dict[str, str]
    bytes: int = 0
    parts: dict[str, str] = {}
    rows: int | None = None
    tokens: int | None = None
    tokens_per_second: float | None = None


R = TypeVar("R", bound=Result)


class StageRecord(BaseModel):
    """One stage of a run.

    `inputs` is all that the stage depends on; of a stage that works by dataset, `parts` is what
    each dataset's part depends on. `finished` is None until it has finished, and again when what it
    depends on has changed. `result` is that of the last time; `digest` is the result's, and stands
    while the stage is done again. `stamps` has size and time of the outputs. `patches` has the
    outcome of every patch in every kind of process of the stage. `seconds` is wall time.
    """

    inputs: dict[str, str]
    started: str
    finished: str | None = None
    seconds: float = 0.0
    digest: str = ""
    parts: dict[str, str] = {}
    result: SerializeAsAny[Result] | None = None
    stamps: dict[str, atomic.Stamp] = {}
    environment: dict[str, str] = {}
    patches: list[dict[str, Any]] = []


class Manifest(BaseModel):
    """The state of a run directory."""

    schema_version: int = SCHEMA
    spec_compat: str
    created: str
    options: dict[str, Any]
    sources: dict[str, str]
    weights: dict[str, Weights] = {}
    stages: dict[str, StageRecord] = {}

    def save(self, layout: Layout) -> None:
        content = self.model_dump(mode="json")
        content["checksum"] = digest_of(content)
        atomic.write_text(layout.manifest, json.dumps(content, indent=1) + "\n")

    def record(self, stage: Stage[Any]) -> StageRecord | None:
        return self.stages.get(stage.name)

    def result(self, stage: Stage[R]) -> R | None:
        """What the stage made; None while it has not finished."""
        record = self.record(stage)
        made = record.result if record is not None and record.finished is not None else None
        return made if isinstance(made, stage.result) else None


def begin(plan: Plan) -> Manifest:
    return Manifest(
        spec_compat=spec_compat.__version__,
        created=now(),
        options=plan.config.model_dump(mode="json"),
        sources=plan.sources,
        weights=plan.weights,
    )


def find(output: Path, stages: Iterable[Stage[Any]]) -> Manifest | None:
    """The manifest in an output directory, None where nothing is yet.

    Raises UserError when the directory holds something else, or cannot be written.
    """
    file = Layout(output).manifest
    if file.is_file():
        return _read(file, stages)
    if output.exists() and not output.is_dir():
        raise UserError(f"--output {output}: this is a file")
    begun = (".lock", atomic.temporary_of(file).name)  # a run that was killed at once
    if output.is_dir() and any(path.name not in begun for path in output.iterdir()):
        raise UserError(f"--output {output}: not empty, and not the directory of a run")
    parent = next(path for path in (output, *output.absolute().parents) if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UserError(f"--output {output}: {parent} cannot be written")
    return None


def _read(file: Path, stages: Iterable[Stage[Any]]) -> Manifest:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        checksum = content.pop("checksum", None)
        if checksum is not None and checksum != digest_of(content):
            raise UserError(f"{file}: altered since it was written; {REMEDY}")
        schema = content.get("schema_version", SCHEMA)
        known = {stage.name: stage for stage in stages}
        unknown = content.get("options", {}).keys() - RunConfig.model_fields.keys()
        if schema > SCHEMA or unknown or not content.get("stages", {}).keys() <= known.keys():
            raise UserError(
                f"{file}: written by spec-compat {content.get('spec_compat')}, which this one"
                f" ({spec_compat.__version__}) cannot read; install that release, or choose"
                " another directory"
            )
        for name, record in content.get("stages", {}).items():
            if schema == 1:
                _migrate(record, known[name])
            if record.get("result") is not None:
                record["result"] = known[name].result.model_validate(record["result"])
        return Manifest.model_validate({**content, "schema_version": SCHEMA})
    except OSError as error:
        raise UserError(f"{file}: {(error.strerror or str(error)).lower()}") from None
    except (ValueError, AttributeError, TypeError, LookupError, RecursionError):
        # Those that json and pydantic raise are among them.
        raise UserError(f"{file}: not the manifest of a run; {REMEDY}") from None


def _migrate(record: dict[str, Any], stage: Stage[Any]) -> None:
    """Bring a record of schema 1 to this one.

    It had the fields of a result beside its own. The files of the patches have moved since, and
    make the same: their digests are taken for those of today.
    """
    made = {name: record.pop(name) for name in ("outputs", "bytes") if name in record}
    counts = record.pop("counts", {})
    if record.get("finished") is not None:
        own = {"digest": record["digest"], "parts": record.get("parts", {})}
        record["result"] = {**counts, **made, **own}
    inputs = {k: v for k, v in record["inputs"].items() if not fingerprints.is_code(k)}
    record["inputs"] = inputs | fingerprints.patches(stage.name)


def digest_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
