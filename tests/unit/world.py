"""A world of fake packages: `speculators` 0.3.0, `vllm` 0.16.0, and patch files of the test's own.

Code runs in a fresh interpreter, because what is tested is what importing does. Every interpreter
of that world, children included, finds the world's patch files in place of the shipped ones.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

FAKES = {
    "speculators/__init__.py": "",
    "speculators/gen.py": """
        from vllm.config import SchedulerConfig

        def count(n):
            return n

        class Base:
            def inherited(self):
                return "base"

        class Generator(Base):
            def run(self):
                return "original"

            @staticmethod
            def size():
                return 1

            @classmethod
            def name(cls):
                return cls.__name__
    """,
    "speculators/user.py": "from speculators.gen import count",
    "speculators-0.3.0.dist-info/METADATA": "Name: speculators\nVersion: 0.3.0\n",
    "vllm/__init__.py": "",
    "vllm/_version.py": "__version__ = version = '0.16.0'\n",
    "vllm/config.py": """
        class SchedulerConfig:
            def __init__(self, block_size):
                self.block_size = block_size
    """,
}
STAND_IN = """
    import sys
    from types import ModuleType

    patches = ModuleType("spec_compat.patches")
    patches.__path__ = [{path!r}]
    sys.modules["spec_compat.patches"] = patches
"""
HEADER = """
    from functools import wraps
    from spec_compat.patching import NEEDED, Patch, already_fixed, moved, overlay, parameters
"""
RUN = """
    patch = Patch(module="speculators.gen", when={"speculators": ">=0.3,<0.4", "vllm": ">=0.12"})

    @patch.replace("Generator.run")
    def run(original, module):
        @wraps(original)
        def run(self):
            return "patched " + original(self)
        return run
"""
PREAMBLE = """
    import json, sys

    def answer(value):
        print("answer:" + json.dumps(value))

    def states():
        import spec_compat
        return {outcome.id: outcome.state for outcome in spec_compat.report().outcomes}
"""


class World:
    def __init__(self, root: Path) -> None:
        self.site = root / "site"
        self.patches = root / "patches"
        self.reports = root / "reports"
        self.stderr = ""
        for name, text in FAKES.items():
            self.write(name, text)
        self.write("sitecustomize.py", STAND_IN.format(path=str(self.patches)))
        self.patches.mkdir()

    def write(self, name: str, text: str) -> None:
        file = self.site / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(dedent(text))

    def patch(self, patch_id: str = "extract/run", text: str = RUN) -> None:
        """A patch file; its id says where it lies."""
        file = self.patches / (patch_id.replace("-", "_") + ".py")
        file.parent.mkdir(exist_ok=True)
        (file.parent / "__init__.py").touch()
        file.write_text(dedent(HEADER) + dedent(text))

    def environ(self, **env: str) -> dict[str, str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("SPEC_COMPAT")}
        return {**clean, "PYTHONPATH": str(self.site), **env}

    def run(self, code: str, *, fails: bool = False, **env: str) -> Any:
        """What the code passes to `answer`, run as a script with `answer` and `states` at hand."""
        script = self.site / "script.py"
        script.write_text(dedent(PREAMBLE) + dedent(code))
        done = subprocess.run(
            [sys.executable, str(script)],
            env=self.environ(**env),
            capture_output=True,
            text=True,
            timeout=60,
        )
        self.stderr = done.stderr
        assert (done.returncode != 0) == fails, done.stderr
        answers = [line[7:] for line in done.stdout.splitlines() if line.startswith("answer:")]
        return json.loads(answers[-1]) if answers else None
