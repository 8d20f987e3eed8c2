"""Which tokens the head can draft: the most frequent among those that it is trained on."""

from __future__ import annotations

import numpy as np
import torch
from speculators.train.vocab_mapping import (
    build_vocab_mappings_from_distribution,
    combine_token_frequency_distributions,
)
from transformers import AutoTokenizer

import spec_compat
from spec_compat.pipeline.run.manifest import digest_of
from spec_compat.pipeline.run.stage import Job, Result
from spec_compat.pipeline.system import atomic


def run(job: Job) -> Result:
    """Write `vocab_mapping/`.

    `token_freq.pt` maps a token id to its count among trainable tokens. `d2t.npy`, int64 [draft],
    is the offset from a draft id to its token id. `t2d.npy`, bool [vocabulary], marks the tokens
    that can be drafted.
    """
    spec_compat.require(stage="map", scope="driver")
    job.events.doing("choosing the draft vocabulary")
    draft_size = job.config.draft_vocab_size
    target_size = job.verifier.geometry.vocab_size
    directory = job.layout.vocab_mapping
    with atomic.replacing_directory(directory) as temporary:
        combine_token_frequency_distributions(
            [job.layout.prepared(dataset.name) / "token_freq.pt" for dataset in job.datasets],
            temporary / "token_freq.pt",
        )
        frequencies = torch.load(temporary / "token_freq.pt", weights_only=True)
        ranked = with_special_tokens_first(frequencies, _added_tokens(job))
        d2t, t2d = build_vocab_mappings_from_distribution(ranked, draft_size, target_size)
        if int(t2d.sum()) != draft_size:
            raise RuntimeError(f"the mapping has {int(t2d.sum())} tokens, not {draft_size}")
        np.save(temporary / "d2t.npy", d2t.numpy())
        np.save(temporary / "t2d.npy", t2d.numpy())
    padded = max(0, draft_size - len(frequencies))
    if padded:
        job.events.note(
            f"only {len(frequencies):,} different tokens are trained on; {padded:,} of "
            f"{draft_size:,} draft tokens are never a target"
        )
    observed = sum(frequencies.values())
    covered = sum(count for token, count in frequencies.items() if t2d[token])
    files = sorted(directory.iterdir())
    outputs = {job.layout.relative(file): atomic.sha256(file) for file in files}
    counts = {
        "tokens": observed,
        "distinct_tokens": len(frequencies),
        "draft_vocab_size": draft_size,
        "target_vocab_size": target_size,
        "padded": padded,
        "coverage": covered / observed,
    }
    return Result(digest_of(outputs), counts, outputs, sum(f.stat().st_size for f in files))


def with_special_tokens_first(
    frequencies: dict[int, int], added_tokens: set[int]
) -> dict[int, int]:
    """Frequencies to choose by: the special tokens of the assistant's turns before all others.

    A head that cannot draft the end token never ends a turn, however rare turns are in the data.
    """
    most = max(frequencies.values(), default=0)
    return {token: count + most * (token in added_tokens) for token, count in frequencies.items()}


def _added_tokens(job: Job) -> set[int]:
    tokenizer = AutoTokenizer.from_pretrained(
        job.config.model, trust_remote_code=job.config.trust_remote_code
    )
    return set(tokenizer.added_tokens_decoder)
