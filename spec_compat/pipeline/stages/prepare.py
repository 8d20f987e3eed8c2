"""The stage prepare: conversations to token ids and loss masks."""

from __future__ import annotations

from spec_compat.pipeline.run import fingerprints
from spec_compat.pipeline.run.manifest import Result
from spec_compat.pipeline.run.plan import Plan
from spec_compat.pipeline.run.stage import Job, Stage


class Prepared(Result):
    """`conversations` counts those in local files; `dropped` rows are no conversation or have
    nothing to train on (`untrainable`), `left_out` ones have no certain loss mask.
    """

    rows: int
    tokens: int
    trainable_tokens: int
    conversations: int = 0
    dropped: int = 0
    untrainable: int = 0
    left_out: int = 0


def inputs(plan: Plan) -> dict[str, str]:
    data = {name: digest for name, digest in plan.sources.items() if name != "model"}
    return {**data, **fingerprints.tokenizer(plan), **fingerprints.chat_template(plan)}


def summary(made: Prepared) -> str:
    return f"{made.trainable_tokens:,} trainable tokens, {made.dropped:,} rows dropped"


PREPARE = Stage(
    name="prepare",
    result=Prepared,
    writes=("prepared",),
    options=(
        "model", "data", "seq_length", "max_samples", "assistant_pattern", "turn_dropout", "seed",
    ),
    packages=("speculators", "transformers", "tokenizers"),
    inputs=inputs,
    summary=summary,
)  # fmt: skip


def run(job: Job) -> Prepared:
    """Write `prepared/<dataset>/`: columns input_ids and loss_mask, int64 of equal length a row."""
    from spec_compat.pipeline.stages import tokenization

    return tokenization.run(job)
