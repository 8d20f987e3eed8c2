"""`spec-compat exec`: someone's own script, in this process, with the patches armed."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import spec_compat
from spec_compat.errors import UserError

AGAIN = "spec_compat.cli.script"
# Tells the processes that the script spawns what to run: `FILE`, or `-m MODULE`, as JSON.
COMMAND = "SPEC_COMPAT_EXEC"


@dataclass(frozen=True)
class Script:
    """A file, or a module in `package`, whose code is to run as `__main__`."""

    name: str
    file: str
    package: str | None
    code: CodeType

    def run(self, main: dict[str, Any]) -> None:
        """Execute the code with `main` as its globals.

        Their spec names `spec_compat.cli.script`, which is what a spawned process imports for it.
        """
        main.update(__file__=self.file, __package__=self.package, __spec__=_Spec(self.package))
        exec(self.code, main)  # noqa: S102


class _Spec(ModuleSpec):
    """Of the script: named like the module that runs it again, inside the script's own package."""

    def __init__(self, package: str | None) -> None:
        super().__init__(AGAIN, None)
        self._package = package

    @property
    def parent(self) -> str | None:
        return self._package


def execute(command: list[str]) -> None:
    """Run `FILE ARGS...` or `-m MODULE ARGS...` as `python` would. Raises UserError.

    Processes that the script spawns arm the patches before they import it again: it may import
    speculators at its top, which fails without them beside transformers 5.
    """
    spec_compat.arm()
    if "SPEC_COMPAT_REPORT_DIR" not in os.environ:
        os.environ["SPEC_COMPAT_REPORT_DIR"] = tempfile.mkdtemp(prefix="spec-compat-report-")
        print(
            f"spec-compat: patches are reported in {os.environ['SPEC_COMPAT_REPORT_DIR']}",
            file=sys.stderr,
        )
    if command[0] == "-m":
        sys.path.insert(0, str(Path.cwd()))
        script = _module(command[1:])
        what, rest = ["-m", script.name], command[2:]
    else:
        script = _file(command[0])
        sys.path.insert(0, str(Path(script.file).resolve().parent))
        what, rest = [script.file], command[1:]
    os.environ[COMMAND] = json.dumps(what)
    sys.argv = [script.file if command[0] == "-m" else command[0], *rest]
    main = ModuleType("__main__")
    # Under the second name a spawned process sends back what it made of the script's classes.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    script.run(vars(main))


def again(main: dict[str, Any]) -> None:
    """Run the script that `execute` runs, in a process that it spawned, with `main` as globals."""
    spec_compat.arm()
    first, *rest = json.loads(os.environ[COMMAND])
    script = _module(rest) if first == "-m" else _file(first)
    if not script.name.endswith(".__main__"):  # a package's, which multiprocessing runs only once
        script.run(main)


def _module(command: list[str]) -> Script:
    if not command:
        raise UserError("exec -m: the name of a module is missing")
    name = command[0]
    try:
        found = find_spec(name)
        if found is not None and found.submodule_search_locations is not None:
            found = find_spec(f"{name}.__main__")
    except (ImportError, ValueError):
        found = None
    code = getattr(found and found.loader, "get_code", lambda name: None)(found and found.name)
    if found is None or code is None:
        raise UserError(f"exec -m {name}: no such module")
    return Script(found.name, found.origin or name, found.parent, code)


def _file(name: str) -> Script:
    path = Path(name).absolute()
    if not path.is_file():
        raise UserError(f"exec {name}: no such file")
    return Script(path.stem, str(path), None, compile(path.read_bytes(), path, "exec"))
