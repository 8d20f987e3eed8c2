"""The stage map: which tokens the head can draft, the most frequent of those it is trained on."""

from __future__ import annotations

import spec_compat
from spec_compat.pipeline.run import fingerprints
from spec_compat.pipeline.run.manifest import Result, digest_of
from spec_compat.pipeline.run.plan import Plan
from spec_compat.pipeline.run.stage import Job, Stage
from spec_compat.pipeline.stages.prepare import PREPARE
from spec_compat.pipeline.system import atomic


class Mapped(Result):
    """`tokens` are those that have a loss, `distinct_tokens` the different ones among them.

    `padded` draft tokens were needed to fill the draft vocabulary and are never a target;
    `coverage` is the share of `tokens` that can be drafted.
    """

    tokens: int
    distinct_tokens: int
    draft_vocab_size: int
    target_vocab_size: int
    padded: int
    coverage: float


def inputs(plan: Plan) -> dict[str, str]:
    vocabulary = {"the verifier's vocabulary": str(plan.verifier.geometry.vocab_size)}
    return {**vocabulary, **fingerprints.tokenizer(plan)}


def summary(made: Mapped) -> str:
    return (
        f"{made.draft_vocab_size:,} draft tokens cover {made.coverage:.2%} of the trainable tokens"
    )


MAP = Stage(
    name="map",
    result=Mapped,
    writes=("vocab_mapping",),
    after=(PREPARE,),
    options=("draft_vocab_size",),
    packages=("speculators",),
    inputs=inputs,
    summary=summary,
)


def run(job: Job) -> Mapped:
    """Write `vocab_mapping/`.

    `token_freq.pt` maps a token id to its count among trainable tokens. `d2t.npy`, int64 [draft],
    is the offset from a draft id to its token id. `t2d.npy`, bool [vocabulary], marks the tokens
    that can be drafted.
    """
    import numpy as np
    import torch
    from speculators.train.vocab_mapping import (
        build_vocab_mappings_from_distribution,
        combine_token_frequency_distributions,
    )

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
    return Mapped(
        digest=digest_of(outputs),
        outputs=outputs,
        bytes=sum(file.stat().st_size for file in files),
        tokens=observed,
        distinct_tokens=len(frequencies),
        draft_vocab_size=draft_size,
        target_vocab_size=target_size,
        padded=padded,
        coverage=covered / observed,
    )


def with_special_tokens_first(
    frequencies: dict[int, int], added_tokens: set[int]
) -> dict[int, int]:
    """Frequencies to choose by: the special tokens of the assistant's turns before all others.

    A head that cannot draft the end token never ends a turn, however rare turns are in the data.
    """
    most = max(frequencies.values(), default=0)
    return {token: count + most * (token in added_tokens) for token, count in frequencies.items()}


def _added_tokens(job: Job) -> set[int]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        job.config.model, trust_remote_code=job.config.trust_remote_code
    )
    return set(tokenizer.added_tokens_decoder)
