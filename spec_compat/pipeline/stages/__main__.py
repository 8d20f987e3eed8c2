"""The entry point of a stage's process: `python -m spec_compat.pipeline.stages STAGE --run DIR`.

Importing this module imports spec_compat, so the patches are armed before anything they wait for.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

from spec_compat.errors import UserError
from spec_compat.pipeline.run.config import ResolvedConfig
from spec_compat.pipeline.run.events import Events
from spec_compat.pipeline.run.layout import STAGES, Layout, Stage
from spec_compat.pipeline.run.manifest import Manifest
from spec_compat.pipeline.run.plan import name_datasets
from spec_compat.pipeline.run.stage import TOLD_OF, Job, Result
from spec_compat.pipeline.system import disk, processes

MODULES: dict[Stage, str] = {
    "prepare": "prepare",
    "extract": "extract",
    "map": "map",
    "train": "train",
    "export": "export",
}

# For a stage without a runner to end by itself.
GRACE_SECONDS = 5.0
LOG_FORMAT = "%(asctime)s %(name)s: %(message)s"


def main(arguments: list[str] | None = None) -> int:
    """Run one stage; exit code 0, 1 for a crash, 2 for what the user can mend."""
    parser = argparse.ArgumentParser(prog="python -m spec_compat.pipeline.stages")
    parser.add_argument("stage", choices=STAGES)
    # torchrun takes what could be the beginning of an option of its own, such as --run, for itself.
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--events", type=Path)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format=LOG_FORMAT)
    events, children = Events(options.events), processes.Children()
    signal.signal(signal.SIGTERM, _stop)
    if options.events is not None:
        threading.Thread(target=_outlive_no_runner, daemon=True).start()
    try:
        result = _function(options.stage)(_job(options.directory, events))
    except KeyboardInterrupt:
        _log_trace()
        return 128 + signal.SIGTERM
    except Exception as error:
        _log_trace()
        known = (
            error if isinstance(error, UserError) else disk.as_user_error(error, options.directory)
        )
        if isinstance(known, disk.Full):
            events.failed("full", str(known), known.place)
        elif known is not None:
            events.failed("user", str(known))
        else:
            events.failed("crash", _one_line(error, children.signal))
        return 1 if known is None else 2
    if int(os.environ.get("RANK", "0")) == 0:
        events.result(**vars(result))
    return 0


def _log_trace() -> None:
    with suppress(OSError):  # the log may lie on the disk that is full
        traceback.print_exc()


def _stop(number: int, frame: FrameType | None) -> None:
    """SIGTERM ends the stage as an exception does: what it has open is closed."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def _outlive_no_runner() -> None:
    """Wait for the end of standard input, which the runner holds, and end the process group.

    The runner was killed: nobody else would end this stage, its workers and loaders.
    """
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os.killpg(0, signal.SIGKILL)


def _function(stage: Stage) -> Callable[[Job], Result]:
    module = importlib.import_module(f"spec_compat.pipeline.stages.{MODULES[stage]}")
    run: Callable[[Job], Result] = module.run
    return run


def _job(run: Path, events: Events) -> Job:
    layout = Layout(run.resolve())
    manifest = Manifest.model_validate_json(layout.manifest.read_text(encoding="utf-8"))
    config = ResolvedConfig.model_validate(manifest.options)
    # Patches read it, in this process and in vLLM's workers.
    os.environ["SPEC_COMPAT_TRUST_REMOTE_CODE"] = str(int(config.trust_remote_code))
    return Job(config, layout, name_datasets(config.data), manifest, events)


def _one_line(error: BaseException, child: int | None) -> str:
    if child is not None and not (child == signal.SIGTERM and TOLD_OF in str(error)):
        return f"a worker process was {processes.killed(child)}"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


if __name__ == "__main__":
    sys.exit(main())
