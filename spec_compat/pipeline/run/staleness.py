"""What decides that a stage is done again, and whether a command may continue a run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from spec_compat.errors import UserError
from spec_compat.pipeline.run import fingerprints
from spec_compat.pipeline.run.config import DEFAULTS, flag
from spec_compat.pipeline.run.layout import Layout
from spec_compat.pipeline.run.manifest import Manifest, StageRecord
from spec_compat.pipeline.run.plan import Plan
from spec_compat.pipeline.run.stage import Stage, Stages
from spec_compat.pipeline.system import atomic

# Compared by content, not by where they lie.
BY_CONTENT = ("model", "data")
# Values of inputs that a run does not have because its release did not know the option.
UNASKED = {flag(name): json.dumps(default) for name, default in DEFAULTS.items()}
# Longer values of an input are not shown.
LONG = 40


class Due(NamedTuple):
    """A stage must be done; `reason` is empty when it has never been."""

    reason: str


class Difference(NamedTuple):
    """An option in which a plan departs from the run that the output directory holds."""

    option: str
    stage: Stage[Any]
    old: Any
    new: Any


def inputs(manifest: Manifest, plan: Plan, stage: Stage[Any]) -> dict[str, str]:
    """All that the stage's result depends on, by a name for people."""
    options = plan.config.model_dump(mode="json", include=set(stage.options) - set(BY_CONTENT))
    return {
        **{flag(name): json.dumps(value) for name, value in options.items()},
        **fingerprints.releases(stage.packages),
        **fingerprints.patches(stage.name),
        **stage.inputs(plan),
        **{f"the result of {s}": r.digest for s in stage.after if (r := manifest.record(s))},
    }


def parts(manifest: Manifest, stage: Stage[Any]) -> dict[str, str]:
    """What each dataset's part of a stage depends on, of a stage that has such parts."""
    made = [manifest.result(before) for before in stage.after] if stage.by_dataset else []
    return {name: digest for result in made if result for name, digest in result.parts.items()}


def due(manifest: Manifest, plan: Plan, stage: Stage[Any], refresh: bool = False) -> Due | None:
    """Why the stage must be done; None when it need not be.

    Files with other times than those recorded, as in a copy of the run, are read again. `refresh`
    keeps the new times, so that this happens once; the caller must hold the run's lock.
    """
    record = manifest.record(stage)
    if record is None:
        return Due("")
    now = inputs(manifest, plan, stage)
    for name in dict.fromkeys((*now, *record.inputs)):
        old, new = record.inputs.get(name, UNASKED.get(name)), now.get(name)
        if old != new:
            short = old and new and max(len(old), len(new)) < LONG
            return Due(f"{name} was {old}, is {new}" if short else f"{name} has changed")
    if record.finished is None:
        return Due("")
    for name, reason in _altered(record, Layout(plan.config.output)):
        return Due(f"{name} {reason}")
    reason = stage.altered(plan, record, refresh)
    return Due(reason) if reason else None


def kept(manifest: Manifest, stage: Stage[Any], now: Mapping[str, str]) -> set[str]:
    """The datasets whose part of the stage stays although its inputs are now others.

    That is so when nothing else has changed than the results that the parts are made from.
    """
    before = manifest.record(stage)
    if before is None:
        return set()
    results = {f"the result of {name}": "" for name in stage.after}
    if {**before.inputs, **results} != {**now, **results}:
        return set()
    made_from = parts(manifest, stage)
    return {name for name, digest in before.parts.items() if made_from.get(name) == digest}


def drop_altered(record: StageRecord, layout: Layout) -> None:
    """Remove outputs that were altered: a stage that goes on would record them as its own."""
    for name, _reason in list(_altered(record, layout)):
        layout.remove(name)


def _altered(record: StageRecord, layout: Layout) -> Iterator[tuple[str, str]]:
    """Outputs that are not what was recorded, each with the reason."""
    for name, digest in record.result.outputs.items() if record.result else ():
        stamp = atomic.Stamp.of(layout.root / name)
        if stamp is None:
            yield name, "is missing"
        elif stamp != record.stamps.get(name):
            if atomic.sha256(layout.root / name) != digest:
                yield name, "has been altered"
            else:
                record.stamps[name] = stamp


def refuse_another_run(
    manifest: Manifest, plan: Plan, stages: Stages, first: Stage[Any] | None
) -> None:
    """Raise UserError unless the plan continues the run, or redoes it from the stage asked for."""
    for difference in differences(manifest, plan, stages):
        if first is not None and stages.index(first) <= stages.index(difference.stage):
            continue
        redone = [stage for stage in stages[: stages.index(difference.stage) + 1] if stage.public]
        old, new = _written(difference.old), _written(difference.new)
        raise UserError(
            f"--output {plan.config.output}: belongs to another run, whose "
            f"{flag(difference.option)} is {old}, not {new};"
            f" choose another directory, or redo this one with --from {redone[-1]}"
        )


def differences(manifest: Manifest, plan: Plan, stages: Stages) -> list[Difference]:
    """Where the command asks for other results than the run has, in the order of the stages.

    Other content under the same path is no other run: the stages that read it are done again.
    """
    new = plan.config.model_dump(mode="json")
    found = []
    for stage in stages:
        for name in stage.options:
            old = manifest.options.get(name, DEFAULTS.get(name))
            same = name in BY_CONTENT and _digests(manifest, name) == _digests(plan, name)
            if old != new[name] and not same:
                found.append(Difference(name, stage, old, new[name]))
    return found


def _digests(of: Manifest | Plan, name: str) -> dict[str, str]:
    """The digests of the model, or of all data."""
    return {source: digest for source, digest in of.sources.items() if source.split()[0] == name}


def _written(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
