"""`spec-compat exec`: someone's own script, in this process, with the patches armed."""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
from importlib.util import find_spec
from multiprocessing import spawn
from pathlib import Path
from typing import Any

import spec_compat
from spec_compat.errors import UserError

HAND_DOWN = f"from {__name__} import hand_down; hand_down()"


def execute(command: list[str]) -> None:
    """Run `FILE ARGS...` or `-m MODULE ARGS...` as `python` would. Raises UserError.

    Both are run under the name `__main__` with a spec or a file that multiprocessing can import
    again, so that scripts which spawn workers work.
    """
    spec_compat.arm()
    hand_down()
    if "SPEC_COMPAT_REPORT_DIR" not in os.environ:
        os.environ["SPEC_COMPAT_REPORT_DIR"] = tempfile.mkdtemp(prefix="spec-compat-report-")
        print(
            f"spec-compat: patches are reported in {os.environ['SPEC_COMPAT_REPORT_DIR']}",
            file=sys.stderr,
        )
    if command[0] == "-m":
        _module(command[1:])
    else:
        _file(command)


def hand_down() -> None:
    """Have every process that this one spawns arm the patches before it imports the script again.

    The script may import speculators at its top, which fails without them beside transformers 5.
    """
    command_line = spawn.get_command_line

    def get_command_line(**words: Any) -> list[str]:
        *python, program, mark = command_line(**words)
        return [*python, f"{HAND_DOWN}; {program}", mark]

    spawn.get_command_line = get_command_line


def _module(command: list[str]) -> None:
    if not command:
        raise UserError("exec -m: the name of a module is missing")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = find_spec(command[0])
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise UserError(f"exec -m {command[0]}: no such module")
    sys.argv = command
    runpy.run_module(command[0], run_name="__main__", alter_sys=True)


def _file(command: list[str]) -> None:
    script = Path(command[0])
    if not script.is_file():
        raise UserError(f"exec {script}: no such file")
    sys.path.insert(0, str(script.resolve().parent))
    sys.argv = command
    runpy.run_path(str(script), run_name="__main__")
