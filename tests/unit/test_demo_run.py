"""What the demo asks, what it starts and what it prints; nothing here loads a model."""

from __future__ import annotations

import hashlib
import json
import shlex
from pathlib import Path

import pytest

from spec_compat.demo import answers, model
from spec_compat.demo.__main__ import serving


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
