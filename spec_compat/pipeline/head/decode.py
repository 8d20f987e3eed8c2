"""Greedy decoding of some prompts in vLLM: `python decode.py REQUEST.json RESULT.json`.

Runs in any interpreter that has vLLM; nothing else of spec_compat is needed there.

The request has model, head (or null), prompts (lists of token ids, or of chat messages),
speculative_tokens, max_tokens and options of vllm.LLM. The result has the token ids of each answer;
without a head, the likeliest tokens' logprobs at each position; with one, what was accepted.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

TOP = 5
COUNTERS = ("num_drafts", "num_accepted_tokens", "num_accepted_tokens_per_pos")


def main(request: dict[str, Any]) -> dict[str, Any]:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM, SamplingParams

    head, prompts = request["head"], request["prompts"]
    options = dict(request["options"])
    if head is not None:
        options["speculative_config"] = {
            "method": "eagle3",
            "model": head,
            "num_speculative_tokens": request["speculative_tokens"],
        }
    llm = LLM(
        request["model"],
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        seed=0,
        **options,
    )
    sampling = SamplingParams(
        temperature=0.0, max_tokens=request["max_tokens"], logprobs=None if head else TOP
    )
    if isinstance(prompts[0][0], int):
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling)
    else:
        outputs = llm.chat(prompts, sampling)
    answers = [output.outputs[0] for output in outputs]
    result: dict[str, Any] = {"tokens": [list(answer.token_ids) for answer in answers]}
    if head is None:
        result["logprobs"] = [
            [{token: top.logprob for token, top in at.items()} for at in answer.logprobs]
            for answer in answers
        ]
    else:
        found = {metric.name: metric for metric in llm.get_metrics()}
        for name in COUNTERS:
            metric = found[f"vllm:spec_decode_{name}"]
            result[name] = getattr(metric, "values", None) or metric.value
    return result


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    target.write_text(json.dumps(main(json.loads(source.read_text()))))
