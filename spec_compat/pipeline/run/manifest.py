"""manifest.json: what a run is made from, what each stage did, and the proof of its patches."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel

import spec_compat
from spec_compat.errors import UserError
from spec_compat.pipeline.inputs.weights import Weights
from spec_compat.pipeline.rows.index import SHARDS, Index
from spec_compat.pipeline.run import fingerprints
from spec_compat.pipeline.run.config import RunConfig, flag, options_of, stage_of
from spec_compat.pipeline.run.layout import STAGES, Layout, Stage
from spec_compat.pipeline.run.plan import Plan
from spec_compat.pipeline.system import atomic

SCHEMA = 1
# Compared by content, not by where they lie.
BY_CONTENT = ("model", "data")
# The stages whose results a stage reads.
AFTER: Mapping[Stage, tuple[Stage, ...]] = {
    "prepare": (),
    "extract": ("prepare",),
    "map": ("prepare",),
    "train": ("extract", "map"),
    "export": ("train",),
}
# What an option was before there was one: a run that a release began goes on with the next.
DEFAULTS = {
    name: field.default for name, field in RunConfig.model_fields.items() if not field.is_required()
}
UNASKED = {flag(name): json.dumps(default) for name, default in DEFAULTS.items()}
REMEDY = "restore it, or choose another directory"
# Values of an input that are too long to be shown.
LONG = 40


class StageRecord(BaseModel):
    """One stage of a run.

    `inputs` is all that the stage depends on, `digest` that of what it made, `parts` that of each
    dataset's tokens. `outputs` maps files, relative to the run directory, to their SHA-256,
    `stamps` to their size and time. `patches` has the outcome of every patch in every kind of
    process of the stage. `seconds` is wall time; `finished` is None until it is.
    """

    inputs: dict[str, str]
    started: str
    finished: str | None = None
    seconds: float = 0.0
    bytes: int = 0
    digest: str = ""
    parts: dict[str, str] = {}
    counts: dict[str, Any] = {}
    outputs: dict[str, str] = {}
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
    stages: dict[Stage, StageRecord] = {}

    def save(self, layout: Layout) -> None:
        content = self.model_dump(mode="json")
        content["checksum"] = digest_of(content)
        atomic.write_text(layout.manifest, json.dumps(content, indent=1) + "\n")


class Difference(NamedTuple):
    """An option in which a plan departs from the run that the output directory holds."""

    option: str
    stage: Stage
    old: Any
    new: Any


def begin(plan: Plan) -> Manifest:
    return Manifest(
        spec_compat=spec_compat.__version__,
        created=now(),
        options=plan.config.model_dump(mode="json"),
        sources=plan.sources,
        weights=plan.weights,
    )


def find(output: Path) -> Manifest | None:
    """The manifest in an output directory, None where nothing is yet.

    Raises UserError when the directory holds something else, or cannot be written.
    """
    file = Layout(output).manifest
    if file.is_file():
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            checksum = content.pop("checksum", None)
            if checksum is not None and checksum != digest_of(content):
                raise UserError(f"{file}: altered since it was written; {REMEDY}")
            unknown = content.get("options", {}).keys() - RunConfig.model_fields.keys()
            if content.get("schema_version", SCHEMA) != SCHEMA or unknown:
                raise UserError(
                    f"{file}: written by spec-compat {content.get('spec_compat')}, which this one"
                    f" ({spec_compat.__version__}) cannot read; install that release, or choose"
                    " another directory"
                )
            return Manifest.model_validate(content)
        except OSError as error:
            raise UserError(f"{file}: {(error.strerror or str(error)).lower()}") from None
        except (ValueError, AttributeError, TypeError):  # also what json and pydantic raise
            raise UserError(f"{file}: not the manifest of a run; {REMEDY}") from None
    if output.exists() and not output.is_dir():
        raise UserError(f"--output {output}: this is a file")
    if output.is_dir() and any(path.name != ".lock" for path in output.iterdir()):
        raise UserError(f"--output {output}: not empty, and not the directory of a run")
    parent = next(path for path in (output, *output.absolute().parents) if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UserError(f"--output {output}: {parent} cannot be written")
    return None


def differences(manifest: Manifest, plan: Plan) -> list[Difference]:
    """Where the command asks for other results than the run has, in the order of the stages.

    Other content under the same path is no other run: the stages that read it are done again.
    """
    found = []
    for name, new in plan.config.model_dump(mode="json").items():
        stage, old = stage_of(name), manifest.options.get(name, DEFAULTS.get(name))
        if name in BY_CONTENT:
            stage = (
                "prepare"
                if _content(manifest.sources, name) != _content(plan.sources, name)
                else None
            )
        if stage is not None and old != new:
            found.append(Difference(name, stage, old, new))
    return sorted(found, key=lambda difference: STAGES.index(difference.stage))


def _content(sources: Mapping[str, str], name: str) -> dict[str, str]:
    """The digests of the model, or of all data."""
    return {source: digest for source, digest in sources.items() if source.split()[0] == name}


def refuse_another_run(manifest: Manifest, plan: Plan, first: Stage | None) -> None:
    """Raise UserError unless the plan continues the run, or redoes it from the stage asked for."""
    for difference in differences(manifest, plan):
        if first is not None and STAGES.index(first) <= STAGES.index(difference.stage):
            continue
        raise UserError(
            f"--output {plan.config.output}: belongs to another run, whose {_describe(difference)};"
            f" choose another directory, or redo this one with --from {_public(difference.stage)}"
        )


def inputs(manifest: Manifest, plan: Plan, stage: Stage) -> dict[str, str]:
    """All that the stage's result depends on, by name; what comes before it has finished."""
    options = options_of(plan.config, stage)
    if stage == "export" and plan.config.verifier_name is None:
        options["verifier_name"] = plan.config.model
    if stage in fingerprints.TOKENIZER_STAGES and plan.verifier.offers_code:
        options["trust_remote_code"] = plan.config.trust_remote_code  # it is another tokenizer
    geometry = {"the verifier's vocabulary": str(plan.verifier.geometry.vocab_size)}
    return {
        **(geometry if stage == "map" else {}),
        **{name: plan.sources[name] for name in plan.sources if _reads(stage, name)},
        **{flag(name): json.dumps(options[name]) for name in options if name not in BY_CONTENT},
        **fingerprints.of(stage, plan.verifier),
        **{f"the result of {name}": manifest.stages[name].digest for name in AFTER[stage]},
    }


def _reads(stage: Stage, source: str) -> bool:
    return stage in ("extract", "train") if source == "model" else stage == "prepare"


def fault(
    manifest: Manifest, plan: Plan, layout: Layout, stage: Stage, locked: bool = False
) -> str | None:
    """Why the stage must be done: empty when it never was, None when it need not be.

    Files with other times than those recorded, as in a copy of the run, are read. What is `locked`
    by the caller keeps the new ones: the rows' index on the disk, `manifest` in memory.
    """
    record = manifest.stages.get(stage)
    if record is None:
        return ""
    now = inputs(manifest, plan, stage)
    for name in dict.fromkeys((*now, *record.inputs)):
        old, new = record.inputs.get(name, UNASKED.get(name)), now.get(name)
        if old != new:
            short = old and new and max(len(old), len(new)) < LONG
            return f"{name} was {old}, is {new}" if short else f"{name} has changed"
    if record.finished is None:
        return ""
    for name, reason in _altered(record, layout):
        return f"{name} {reason}"
    if stage == "extract":
        return _altered_rows(plan, layout, record, locked)
    return None


def kept(manifest: Manifest, stage: Stage, inputs: Mapping[str, str]) -> set[str]:
    """The datasets whose part of a stage stays what it is with other inputs: those of extract.

    Where nothing but the tokens has changed, the rows are those of every dataset with the same.
    """
    before = manifest.stages.get(stage)
    if stage != "extract" or before is None:
        return set()
    tokens = {"the result of prepare": ""}
    if {**before.inputs, **tokens} != {**inputs, **tokens}:
        return set()
    now = manifest.stages["prepare"].parts
    return {name for name, digest in before.parts.items() if now.get(name) == digest}


def drop_altered(record: StageRecord, layout: Layout) -> None:
    """Remove what is not as it was recorded: a stage that goes on would record it as its own."""
    for name, _reason in list(_altered(record, layout)):
        layout.remove(name)


def _altered(record: StageRecord, layout: Layout) -> Iterator[tuple[str, str]]:
    """Outputs that are not what was recorded, each with the reason."""
    for name, digest in record.outputs.items():
        stamp = atomic.Stamp.of(layout.root / name)
        if stamp is None:
            yield name, "is missing"
        elif stamp != record.stamps.get(name):
            if atomic.sha256(layout.root / name) != digest:
                yield name, "has been altered"
            else:
                record.stamps[name] = stamp


def _altered_rows(
    plan: Plan, layout: Layout, record: StageRecord, locked: bool = False
) -> str | None:
    there, rows = 0, record.counts["rows"]
    for dataset in plan.datasets:
        index = Index(layout.rows(dataset.name))
        shards = layout.relative(index.directory / SHARDS)
        if shards not in record.outputs and (layout.root / shards).exists():
            return f"{shards} is not of this run"
        for name, reason in index.check().items():
            return f"{layout.relative(index.directory / name)}: {reason}"
        if index.copied and locked:
            index.close()
        there += len(index)
    return None if there >= rows else f"{there} of {rows} rows are in the index"


def digest_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


@contextmanager
def locked(layout: Layout) -> Iterator[int]:
    """Hold the run directory, created if need be; a process that inherits the descriptor holds it.

    Raises UserError when another process does. No crash leaves the lock behind.
    """
    layout.root.mkdir(parents=True, exist_ok=True)
    with layout.lock.open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"--output {layout.root}: another process works on this run") from None
        except OSError as error:
            raise UserError(
                f"--output {layout.root}: its file system has no locks"
                f" ({os.strerror(error.errno or 0).lower()}), and two runs would spoil each other;"
                " choose a directory elsewhere"
            ) from None
        yield stream.fileno()


def _describe(difference: Difference) -> str:
    option, _, old, new = difference
    return f"{flag(option)} is {_written(old)}, not {_written(new)}"


def _written(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _public(stage: Stage) -> Stage:
    return "train" if stage == "export" else stage
