"""The command line: parse, call, print. What a command needs is imported when it runs."""

from __future__ import annotations


def main() -> None:
    """Entry point of `spec-compat`."""
    from spec_compat.cli.app import app

    app(prog_name="spec-compat")


def run_pipeline_main() -> None:
    """Entry point of `run-pipeline`, the same as `spec-compat run-pipeline`."""
    from spec_compat.cli.app import pipeline_app

    pipeline_app(prog_name="run-pipeline")
