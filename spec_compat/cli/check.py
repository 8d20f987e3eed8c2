"""`spec-compat check-head` and `spec-compat verify`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from spec_compat import versions
from spec_compat.pipeline.head import releases, serve
from spec_compat.pipeline.head.check import Head, check_head
from spec_compat.pipeline.head.serve import Served
from spec_compat.pipeline.origin import Origin, origin

# Share of a text from which on it passes for the verifier's own.
OWN = 0.9
FOUND = 4  # exit code: what was asked about is there, and is not sound


def head(
    directory: Path,
    with_vllm: bool,
    python: Path | None,
    prompts: Path | None,
    options: dict[str, Any],
    as_json: bool,
) -> int:
    """Check a head, and serve it if asked to; 4 when there are problems, else 0.

    `options` are vLLM's, over those of the run that the head comes from.
    """
    found, problems = check_head(directory)
    content: dict[str, Any] = {"head": str(directory), "problems": problems}
    interpreter = python or Path(sys.executable)
    architectures: list[str] = []
    if not problems:
        architectures = found.config["speculators_config"]["verifier"].get("architectures") or []
    if architectures:
        content["served_by"] = releases.served_by(architectures)
    if not problems and (with_vllm or python or "vllm" in versions.detect(["vllm"]).releases):
        content["serving"] = _serving(architectures, interpreter)
    if with_vllm and not problems:
        problems += _serving(architectures, interpreter, sure=True)
    if with_vllm and not problems:
        run = origin(directory)
        served = _serve(directory, found, interpreter, prompts, run, options)
        content |= {"served": asdict(served), "expected": run.expected if run else None}
        content["own_answers"] = run.own if run else None
        if served.different:
            problems.append(
                f"{served.different} of {served.prompts} answers are others than without the head"
            )
    if as_json:
        print(json.dumps(content, indent=1))
    else:
        _print(content)
    return FOUND if problems else 0


def rows(directory: Path, samples: int, as_json: bool) -> int:
    """Verify the rows of a run; 4 when there are problems, else 0."""
    from spec_compat.pipeline.verify import verify

    console = Console(stderr=True)
    begun = _begun(console)
    # Code that comes with the verifier may print, and what is printed here may be read as JSON.
    with (
        redirect_stdout(sys.stderr),
        Progress(console=console, transient=True, disable=not console.is_terminal) as bar,
    ):
        task = bar.add_task("reading", total=None)

        def progress(text: str, done: int, total: int) -> None:
            begun(text)
            bar.update(task, description=text, completed=done, total=total)

        found = verify(directory, samples, progress)
    if as_json:
        print(json.dumps(asdict(found), indent=1))
        return FOUND if found.problems else 0
    print(f"{found.rows:,} rows, {found.tokens:,} tokens were checked")
    if found.recomputed:
        print(f"{found.recomputed} rows were recomputed with transformers; relative error:")
        for layer_id, (median, worst) in found.errors.items():
            print(f"  after layer {layer_id}: {median:.2%} (median token), {worst:.2%} (worst)")
    for problem in found.problems:
        print(f"problem: {problem}")
    return FOUND if found.problems else 0


def _serving(architectures: list[str], python: Path, sure: bool = False) -> list[str]:
    """What keeps the interpreter's vLLM from serving the head, as far as is known beforehand."""
    release = serve.installed(python)
    if not architectures:
        return []
    return releases.serving_problems(architectures, release.version, release.on_cpu, sure)


def _serve(
    directory: Path,
    head: Head,
    python: Path,
    prompts: Path | None,
    run: Origin | None,
    options: dict[str, Any],
) -> Served:
    if prompts is not None:
        questions = serve.from_file(prompts)
    else:
        questions = run.prompts if run and run.prompts else serve.chats()
    options = {**(run.options if run else {}), **options}
    console = Console(stderr=True)
    begun = _begun(console)
    with console.status("decoding") as status:

        def doing(text: str) -> None:
            begun(text)
            status.update(text)

        return serve.serve(directory, head, questions, python, options, doing)


def _begun(console: Console) -> Callable[[str], None]:
    """Says each thing that is begun, where no terminal shows it at work."""
    last = ""

    def say(text: str) -> None:
        nonlocal last
        if text != last and not console.is_terminal:
            print(text, file=sys.stderr, flush=True)
        last = text

    return say


def _print(content: dict[str, Any]) -> None:
    if served := content.get("served"):
        print(
            f"{served['prompts']} prompts, {served['tokens']:,} tokens, {served['drafts']:,} "
            f"drafts; {served['near_ties']} answers part at a near-tie from those without the head"
        )
        Console().print(_acceptance(served, content["expected"]))
        if (own := content["own_answers"]) is not None and own < OWN:
            print(
                f"note: the verifier itself would have said {own:.0%} of the text that training "
                "measured on; of its own text, which it serves, other shares are accepted"
            )
    for problem in content["problems"]:
        print(f"problem: {problem}")
    if not content["problems"] and not served:
        for line in content.get("serving") or filter(None, [content.get("served_by")]):
            print(f"note: {line}")
    print(f"{content['head']}: {'not sound' if content['problems'] else 'sound'}")


def _acceptance(served: dict[str, Any], expected: list[float] | None) -> Table:
    table = Table("position", "accepted", "expected", title="Acceptance", title_justify="left")
    for position, share in enumerate(served["acceptance"]):
        known = "not known" if expected is None else f"{expected[position]:.1%}"
        table.add_row(str(position), f"{share:.1%}", known)
    length = f"{1 + sum(expected):.2f}" if expected is not None else "not known"
    table.add_row("length", f"{served['acceptance_length']:.2f}", length)
    return table
