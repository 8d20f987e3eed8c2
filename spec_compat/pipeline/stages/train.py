"""The stage train: the draft head, by speculators' trainer."""

from __future__ import annotations

from rich.table import Table

from spec_compat.pipeline.run.config import ResolvedConfig
from spec_compat.pipeline.run.manifest import Result
from spec_compat.pipeline.run.stage import Job, Stage
from spec_compat.pipeline.stages.extract import EXTRACT
from spec_compat.pipeline.stages.map import MAP
from spec_compat.pipeline.system import gpus


class Trained(Result):
    """`tokens` counts those of all epochs, `waited_for_data` is a share of the time.

    `validation` has the trainer's metrics after the last epoch, by name. For `acceptance`,
    `following_acceptance` and `own_answers` see head.acceptance.Acceptance. `held_out` names rows
    for check-head. What is None was not measured by the release that trained.
    """

    rows: int
    validation_rows: int
    tokens: int
    epochs: int
    steps: int
    ttt_steps: int
    total_seq_len: int
    validation: dict[str, float]
    acceptance: list[float]
    expected_acceptance_length: float
    held_out: list[str]
    following_acceptance: list[float] | None = None
    own_answers: float | None = None
    waited_for_data: float | None = None
    train_dtype: str | None = None


def summary(made: Trained) -> str:
    steps = f"{made.steps:,} steps, {made.epochs} epochs in {made.train_dtype or 'float32'}"
    waited = made.waited_for_data
    return steps if waited is None else f"{steps}, {waited:.1%} waiting for data"


def tables(made: Trained) -> list[Table]:
    """The last validation."""
    caption = f"expected acceptance length: {made.expected_acceptance_length:.2f}"
    if made.own_answers is not None:
        caption += f"; the verifier itself would have said {made.own_answers:.0%} of this text"
    table = Table(
        title=f"Validation after epoch {made.epochs}",
        caption=caption,
        title_justify="left",
        caption_justify="left",
    )
    for heading in ("speculative step", "loss", "accepted", "accepted if the steps before are"):
        table.add_column(heading, justify="right")
    following = made.following_acceptance
    for step, share in enumerate(made.acceptance):
        table.add_row(
            str(step + 1),
            f"{made.validation[f'loss_{step}']:.3f}",
            f"{share:.1%}",
            f"{following[step]:.1%}" if following else "not known",
        )
    return [table] if made.validation else []


def ranks(config: ResolvedConfig) -> int:
    return config.train_gpus or gpus.count()


TRAIN = Stage(
    name="train",
    result=Trained,
    writes=("checkpoints", "logs/metrics.jsonl"),
    after=(EXTRACT, MAP),
    options=(
        "epochs", "lr", "train_dtype", "ttt_steps", "ttt_step_loss_decay", "use_off_policy_tokens",
        "num_layers", "draft_heads", "draft_kv_heads", "draft_head_dim", "draft_intermediate_size",
        "noise_std", "total_seq_len", "val_ratio",
    ),
    packages=("speculators",),
    inputs=lambda plan: {"model": plan.model},
    gpus=True,
    ranks=ranks,
    summary=summary,
    tables=tables,
)  # fmt: skip


def run(job: Job) -> Trained:
    """Write `checkpoints/<epoch>/`; goes on after the last epoch that is whole."""
    from spec_compat.pipeline.stages import training

    return training.run(job)
