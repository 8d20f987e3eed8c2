"""The commands of `spec-compat`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from spec_compat import hooks
from spec_compat.cli import doctor as checkup
from spec_compat.cli import execute, patches
from spec_compat.cli.flags import with_run_options
from spec_compat.errors import SpecCompatError, UserError
from spec_compat.pipeline.system import disk, processes

app = typer.Typer(
    help="Runs speculators' EAGLE-3 pipeline, correctly, on the vLLM release that is installed.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
pipeline_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="TOML file of options; flags win over it.")
]
First = Annotated[
    str | None,
    typer.Option("--from", metavar="STAGE", help="First stage: prepare, extract, map or train."),
]
Last = Annotated[
    str | None,
    typer.Option("--to", metavar="STAGE", help="Last stage; the head is exported after train."),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print the plan, sizes and counts, and do nothing.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def run_pipeline(
    flags: dict[str, Any],
    config: ConfigFile = None,
    first: First = None,
    last: Last = None,
    dry_run: DryRun = False,
) -> None:
    """From conversations to a draft head: prepare, extract, map, train.

    A run that was stopped is continued by the same command, or with --output alone.
    """
    _guarded(lambda: _pipeline(flags, config, first, last, dry_run))


def _pipeline(*given: Any) -> None:
    from spec_compat.cli import run  # needs what comes with vLLM; `doctor` says when it is missing

    run.pipeline(*given)


def _stage_command(stage: str, summary: str) -> None:
    def command(flags: dict[str, Any], config: ConfigFile = None, dry_run: DryRun = False) -> None:
        _guarded(lambda: _pipeline(flags, config, stage, stage, dry_run))

    command.__doc__ = f"{summary}\n\nOptions not given are those of the run in --output."
    app.command(stage)(with_run_options(command))


app.command("run-pipeline")(with_run_options(run_pipeline))
pipeline_app.command()(with_run_options(run_pipeline))
_stage_command("prepare", "Turn conversations into token ids and loss masks.")
_stage_command("extract", "Extract the verifier's hidden states of every row.")
_stage_command("map", "Choose the tokens that the head can draft.")
_stage_command("train", "Train the head and export it.")


@app.command()
def doctor(json: AsJson = False) -> None:
    """Say what is installed, which patches apply and why, and whether the pipeline can run."""
    _guarded(lambda: checkup.doctor(as_json=json))


@app.command("list")
def list_patches(json: AsJson = False) -> None:
    """List the patches and whether they apply here."""
    _guarded(lambda: patches.list_all(as_json=json))


@app.command()
def show(patch_id: Annotated[str, typer.Argument(metavar="ID")]) -> None:
    """Show a patch: symptom, cause, fix, and when it can go."""
    _guarded(lambda: patches.show(patch_id))


@app.command("check-head")
def check_head(
    directory: Annotated[Path, typer.Argument(metavar="DIR")],
    serve: Annotated[
        bool, typer.Option("--serve", help="Decode with and without the head in vLLM.")
    ] = False,
    python: Annotated[
        Path | None, typer.Option(help="Interpreter whose vLLM serves (default: this one).")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="A question a line (default: rows that the run held out, or a few)."),
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option(help="With --serve: run the verifier's own code, as its run does.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Check a head against its config, its verifier and vLLM; exit code 4 if it is not sound."""
    options = {"trust_remote_code": True} if trust_remote_code else {}

    def checked() -> int:
        from spec_compat.cli import check

        return check.head(directory, serve, python, prompts, options, as_json=json)

    _guarded(checked)


@app.command()
def verify(
    directory: Annotated[Path, typer.Argument(metavar="RUN_DIR")],
    samples: Annotated[
        int, typer.Option(min=0, help="Rows to recompute with transformers; 0 needs no verifier.")
    ] = 4,
    json: AsJson = False,
) -> None:
    """Check the stored rows of a run once more; exit code 4 if one is wrong."""

    def checked() -> int:
        from spec_compat.cli import check

        return check.rows(directory, samples, as_json=json)

    _guarded(checked)


@app.command(
    "exec",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
def execute_script(
    command: Annotated[list[str], typer.Argument(metavar="[-m MOD | FILE] ARGS...")],
) -> None:
    """Run a Python script or module with the patches armed."""
    _guarded(lambda: execute.execute(command), resumable=False)


def _guarded(command: Callable[[], int | None], resumable: bool = True) -> None:
    """Exit code 2 with one line for what the user can mend, 1 for a crash of a stage."""
    hooks.disarm()  # `exec` arms by itself
    try:
        with processes.stopped_once() if resumable else nullcontext():
            code = command()
    except UserError as error:
        _fail(str(error).replace("\n", "\\n"), 2)  # a path may have one
    except SpecCompatError as error:
        _fail(str(error), 1)
    except ModuleNotFoundError as error:
        if not resumable or (error.name or __package__).startswith("spec_compat"):
            raise
        _fail(f"{error.name} is not installed; spec-compat doctor says what else is missing", 2)
    except OSError as error:
        if not resumable or not disk.described(error):
            raise
        if not error.filename:  # what is still in its buffer would fail once more
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        _fail(disk.described(error), 2)
    except KeyboardInterrupt:
        if not resumable:
            raise
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one that comes now changes nothing
        _fail("stopped; the same command goes on from here", 130)
    if code:
        raise typer.Exit(code)


def _fail(message: str, code: int) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    raise typer.Exit(code)
