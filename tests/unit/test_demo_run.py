"""What the demo asks, what it starts and what it prints; nothing here loads a model."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from examples.demo import STOPPED, answers, model
from examples.demo.__main__ import serving


def test_there_are_150_different_prompts() -> None:
    prompts = answers.prompts()
    assert len(prompts) == 150
    assert len({prompt.casefold() for prompt in prompts}) == 150
    assert all(prompt == prompt.strip() and 10 < len(prompt) < 200 for prompt in prompts)


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPEC_COMPAT_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert model.cache_root() == Path.home() / ".cache" / "spec-compat"
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert model.cache_root() == Path("/xdg/spec-compat")
    monkeypatch.setenv("SPEC_COMPAT_CACHE", "/own")
    assert model.cache_root() == Path("/own")


def test_a_damaged_conversion_is_not_whole(tmp_path: Path) -> None:
    assert not model.is_whole(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"weights")
    files = {weights.name: hashlib.sha256(b"weights").hexdigest()}
    (tmp_path / model.RECORD).write_text(json.dumps({"recipe": model.RECIPE, "files": files}))
    assert model.is_whole(tmp_path)
    weights.write_bytes(b"weighty")
    assert not model.is_whole(tmp_path)
    weights.unlink()
    assert not model.is_whole(tmp_path)


def test_the_serve_command_survives_a_shell() -> None:
    head = Path("/runs/my demo/head")
    (line,) = [line for line in serving(Path("/m"), head).splitlines() if "vllm serve" in line]
    words = shlex.split(line[line.index("vllm serve") :])
    assert words[:4] == ["vllm", "serve", "/m", "--speculative-config"]
    assert json.loads(words[4]) == {
        "method": "eagle3",
        "model": str(head),
        "num_speculative_tokens": 3,
    }


# Says that it is there, and needs a while to end.
STEP = """
import sys, time
try:
    print("there", flush=True)
    time.sleep(30)
except KeyboardInterrupt:
    time.sleep(0.6)
    sys.exit("error: the step has stopped")
"""


@pytest.mark.parametrize(
    ("first", "code", "said"),
    [
        ("lambda: None", 1, "error: the step has stopped"),
        ("lambda: print('there', flush=True) or time.sleep(30)", 130, STOPPED),
    ],
    ids=["in a step", "in the conversion"],
)
def test_ctrl_c_is_one_line_of_what_was_stopped(first: str, code: int, said: str) -> None:
    script = f"""
import sys, time
from examples.demo import __main__ as demo
demo.model.verifier, demo.answers.conversations = {first}, lambda verifier: None
demo.pipeline = lambda *options: [sys.executable, "-c", {STEP!r}]
sys.exit(demo.guarded())
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # its group is what a terminal sends Ctrl-C to
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout is not None
    while process.stdout.readline().strip() != "there":
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (code, f"{said}\n")
