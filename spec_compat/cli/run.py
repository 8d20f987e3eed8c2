"""`run-pipeline` and the stages alone: from flags to a finished run."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from spec_compat import registry, versions
from spec_compat.errors import UserError
from spec_compat.pipeline.head import releases
from spec_compat.pipeline.inputs.weights import Weights
from spec_compat.pipeline.run import config, display, manifest, staleness
from spec_compat.pipeline.run import plan as plans
from spec_compat.pipeline.run.display import Display, closing_tables
from spec_compat.pipeline.run.layout import Layout
from spec_compat.pipeline.run.plan import Plan
from spec_compat.pipeline.run.runner import Run
from spec_compat.pipeline.run.stage import Stages, selected
from spec_compat.pipeline.stages import EXPORT, STAGES
from spec_compat.pipeline.system.disk import expanded
from spec_compat.pipeline.system.units import size
from spec_compat.support import support

# A parameter, its gradient and Adam's two moments, in float32.
TRAINED_BYTES = 16


def pipeline(
    flags: dict[str, Any], file: Path | None, first: str | None, last: str | None, dry_run: bool
) -> None:
    """Check everything that can be checked, then run. Raises UserError before anything is made."""
    chosen = selected(STAGES, first, last)
    found = support().check(versions.detect())
    for problem in found.problems:
        raise UserError(problem)
    options, weights = _options(flags, file)
    console = Console() if dry_run else display.console()
    with console.status("checking the verifier and the data"):
        plan = plans.make(options, weights)
    for warning in [*found.warnings, *registry.overrides()]:
        print(f"warning: {warning}", file=sys.stderr)
    if dry_run:
        earlier = manifest.find(plan.config.output, STAGES)
        if earlier is not None:
            asked_for = chosen[0] if first else None
            staleness.refuse_another_run(earlier, plan, STAGES, asked_for)
        _print_plan(console, plan, chosen)
        return
    with Display(console) as shown:
        finished = Run(plan, STAGES, shown, first, last).go()
    for table in closing_tables(finished, STAGES):
        console.print(table)
    if EXPORT in chosen:
        _print_head(console, plan)


def _options(
    flags: dict[str, Any], file: Path | None
) -> tuple[config.RunConfig, dict[str, Weights]]:
    """Flags over the TOML file over the options of the run that the output directory holds.

    And what that run knew of its verifier's weights.
    """
    from_file = config.read_toml(file) if file else {}
    output = flags.get("output", from_file.get("output"))
    earlier = manifest.find(expanded(output), STAGES) if output else None
    if earlier is None:
        return config.load(flags, file), {}
    return config.load(flags, file, earlier.options), earlier.weights


def _print_plan(console: Console, plan: Plan, stages: Stages) -> None:
    def line(name: str, text: object) -> None:
        console.print(f"{name:<12} {text}", markup=False, highlight=False, soft_wrap=True)

    options, verifier, geometry = plan.config, plan.verifier, plan.verifier.geometry
    line("stages", ", ".join(stage.name for stage in stages))
    line("model", options.model)
    line(
        "",
        f"{', '.join(verifier.architectures)}: {geometry.num_layers} layers, hidden size "
        f"{geometry.hidden_size}, {geometry.vocab_size:,} tokens",
    )
    if weights := verifier.weight_bytes:
        each = size(weights // options.tensor_parallel_size)
        line("", f"{size(weights)} of weights, {each} for each of its workers")
    for dataset in plan.datasets:
        check = plan.checks.get(dataset.name)
        line("data", dataset.source)
        if check is None:
            line("", "to be downloaded; its rows are not known yet")
            continue
        rows = min(check.usable, options.max_samples or check.usable)
        tokens = check.estimate_tokens(options.seq_length, options.max_samples)
        line("", f"{check.usable:,} of {check.rows:,} rows are usable, {rows:,} are taken")
        line(
            "",
            f"about {tokens:,} tokens, {size(tokens * plan.bytes_per_token)} of hidden states; "
            f"at most {rows * options.seq_length:,} tokens, "
            f"{size(rows * options.seq_length * plan.bytes_per_token)}",
        )
    line("layers", ", ".join(map(str, options.layer_ids)))
    line("row", f"up to {options.seq_length:,} tokens, {plan.bytes_per_token:,} bytes each")
    line("draft", f"{options.draft_vocab_size:,} tokens, {options.num_layers} layer(s)")
    if options.draft_heads is not None:
        line(
            "",
            f"{options.draft_heads} heads of {options.draft_head_dim}, {options.draft_kv_heads} of "
            f"keys and values, MLP of {options.draft_intermediate_size}",
        )
    if trained := plan.trained_parameters:
        line(
            "",
            f"{trained:,} parameters are trained: with gradients and Adam "
            f"{size(trained * TRAINED_BYTES)}, before they are sharded",
        )
    line("training", f"{options.epochs} epochs, {options.ttt_steps} TTT steps, lr {options.lr:g}")
    line("output", options.output)
    for problem in _serving_problems(plan):
        line("serving", problem)


def _print_head(console: Console, plan: Plan) -> None:
    head = Layout(plan.config.output).head
    console.print(f"\nThe head is in {head}. To serve it:", highlight=False, soft_wrap=True)
    trust = " --trust-remote-code" if plan.config.trust_remote_code else ""
    console.print(
        f"  vllm serve {shlex.quote(str(head))}{trust}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    for problem in _serving_problems(plan):
        console.print(f"  note: {problem}", markup=False, highlight=False, soft_wrap=True)


def _serving_problems(plan: Plan) -> list[str]:
    """Why the installed vLLM cannot serve a head for this verifier on GPUs."""
    release = versions.detect().releases.get("vllm")
    architectures = list(plan.verifier.architectures)
    if release is None or release.version is None or not architectures:
        return []
    return releases.serving_problems(architectures, release.version, on_cpu=False)
