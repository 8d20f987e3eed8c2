"""Runs one stage in this process, and tells the runner how it ended."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from spec_compat.errors import UserError
from spec_compat.pipeline.run.config import ResolvedConfig
from spec_compat.pipeline.run.events import Events, Failed, Finished, RunnerGone
from spec_compat.pipeline.run.layout import Layout
from spec_compat.pipeline.run.manifest import find
from spec_compat.pipeline.run.plan import name_datasets
from spec_compat.pipeline.run.stage import Job, Stage
from spec_compat.pipeline.stages import STAGES
from spec_compat.pipeline.system import disk, processes

LOG_FORMAT = "%(asctime)s %(name)s: %(message)s"


def main(arguments: list[str] | None = None) -> int:
    """Run one stage; exit code 0, 1 for a crash, 2 for what the user can mend."""
    parser = argparse.ArgumentParser(prog="python -m spec_compat.pipeline")
    parser.add_argument("stage", choices=[stage.name for stage in STAGES])
    # torchrun takes what could be the beginning of an option of its own, such as --run, for itself.
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--events", type=Path)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format=LOG_FORMAT)
    signal.signal(signal.SIGTERM, _stop)
    stage = next(stage for stage in STAGES if stage.name == options.stage)
    try:
        return _run(stage, options.directory, Events(options.events))
    except (KeyboardInterrupt, RunnerGone):
        _log_trace()
        return 128 + signal.SIGTERM


def _run(stage: Stage[Any], directory: Path, events: Events) -> int:
    children = processes.Children()
    try:
        result = stage.run(job(directory, events))
    except RunnerGone:
        raise
    except Exception as error:
        _log_trace()
        known = error if isinstance(error, UserError) else disk.as_user_error(error, directory)
        if isinstance(known, disk.Full):
            events.send(Failed(kind="full", text=str(known), place=known.place))
        elif known is not None:
            events.send(Failed(kind="user", text=str(known)))
        else:
            events.send(Failed(kind="crash", text=one_line(error, children.signal)))
        return 1 if known is None else 2
    if int(os.environ.get("RANK", "0")) == 0:
        events.send(Finished(result=result.model_dump(mode="json")))
    return 0


def _log_trace() -> None:
    with suppress(OSError):  # the log may lie on the disk that is full
        traceback.print_exc()


def _stop(number: int, frame: FrameType | None) -> None:
    """SIGTERM ends the stage as an exception does: what it has open is closed."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def job(run: Path, events: Events) -> Job:
    layout = Layout(run.resolve())
    manifest = find(layout.root, STAGES)
    if manifest is None:
        raise UserError(f"{layout.root}: no run in this directory")
    config = ResolvedConfig.model_validate(manifest.options)
    # Patches read it, in this process and in vLLM's workers.
    os.environ["SPEC_COMPAT_TRUST_REMOTE_CODE"] = str(int(config.trust_remote_code))
    if config.train_dtype is not None:
        os.environ["SPEC_COMPAT_TRAIN_DTYPE"] = config.train_dtype
    return Job(config, layout, name_datasets(config.data), manifest, events)


def one_line(error: BaseException, child: int | None) -> str:
    if child is not None and not (child == signal.SIGTERM and processes.TOLD_OF in str(error)):
        return f"a worker process was {processes.killed(child)}"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
