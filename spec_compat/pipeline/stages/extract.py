"""The stage extract: the verifier's hidden states of every row."""

from __future__ import annotations

from spec_compat.pipeline.rows.index import Index
from spec_compat.pipeline.run import servers
from spec_compat.pipeline.run.layout import Layout
from spec_compat.pipeline.run.manifest import Result, StageRecord
from spec_compat.pipeline.run.plan import Plan
from spec_compat.pipeline.run.stage import Job, Stage
from spec_compat.pipeline.stages.prepare import PREPARE
from spec_compat.pipeline.system import gpus


class Extracted(Result):
    """`rows` are stored, `rows_written` of them by this process; `bad_rows` failed their proof.

    `tokens_per_second` is that of this process, 0 where it had nothing to do.
    """

    rows: int
    bad_rows: int = 0
    rows_written: int = 0
    layer_ids: tuple[int, ...]


def altered(plan: Plan, record: StageRecord, refresh: bool) -> str:
    """Why the files of the rows' indexes are not what was written; empty when they are."""
    layout, made = Layout(plan.config.output), record.result
    assert isinstance(made, Extracted)  # noqa: S101
    stored = 0
    for dataset in plan.datasets:
        index = Index(layout.rows(dataset.name))
        for name, reason in index.check().items():
            return f"{layout.relative(index.directory / name)}: {reason}"
        if index.copied and refresh:
            index.close()
        stored += len(index)
    return "" if stored >= made.rows else f"{stored} of {made.rows} rows are in the index"


def summary(made: Extracted) -> str:
    return f"layers {', '.join(map(str, made.layer_ids))}"


EXTRACT = Stage(
    name="extract",
    result=Extracted,
    writes=("gen",),
    after=(PREPARE,),
    options=("layer_ids", "batch_size", "storage", "storage_dtype", "storage_compression"),
    packages=("speculators", "vllm"),
    inputs=lambda plan: {"model": plan.model},
    altered=altered,
    by_dataset=True,
    gpus=True,
    check=lambda config: servers.check_fits(config, gpus.visible()),
    shares_memory=True,
    summary=summary,
)


def run(job: Job) -> Extracted:
    """Write the rows to `gen/<dataset>`, in files of --storage; rows that are whole are kept.

    A row is input_ids int64 [s], loss_mask int64 [s], hidden_states: four tensors [s, hidden] in
    the verifier's dtype, by depth, taken after each layer and before the final norm.
    """
    from spec_compat.pipeline.stages import extraction

    return extraction.run(job)
