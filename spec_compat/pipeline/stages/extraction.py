"""Hidden states of every row, by speculators' generator, each row checked before it is written."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from speculators.data_generation.config_generator import DataGenerationConfig
from speculators.data_generation.vllm_hidden_states_generator import (
    MIN_MAX_BATCHED_TOKENS,
    VllmHiddenStatesGenerator,
)

import spec_compat
from spec_compat.capture.prefill import AHEAD, Prefill, Step, pack
from spec_compat.capture.sink import buffer_count
from spec_compat.errors import UserError
from spec_compat.pipeline.head import targets
from spec_compat.pipeline.rows import index as rows_index
from spec_compat.pipeline.rows.prepared import BAD_ROWS, Prepared
from spec_compat.pipeline.rows.storage import RowFiles, storage
from spec_compat.pipeline.rows.store import Store
from spec_compat.pipeline.run.manifest import digest_of
from spec_compat.pipeline.run.plan import Dataset
from spec_compat.pipeline.run.stage import Job
from spec_compat.pipeline.stages.extract import Extracted
from spec_compat.pipeline.system import atomic, disk
from spec_compat.pipeline.system.units import size
from spec_compat.report import Report

# Beside the states, a row has 16 bytes a token of ids and mask, and a file has its frame.
OVERHEAD = 1.05
# Altered files that are named.
SHOWN = 5


def run(job: Job) -> Extracted:
    """Write the rows to `gen/<dataset>`, in files of --storage; those that are there are kept.

    A row is input_ids int64 [s], loss_mask int64 [s], hidden_states: four tensors [s, hidden] in
    the verifier's dtype, by depth, taken after each layer and before the final norm.
    """
    spec_compat.require(stage="extract", scope="driver")
    config = job.config
    rows = {d.name: Prepared(job.layout.prepared(d.name)) for d in job.datasets}
    kind = storage(
        config.storage,
        fp8=config.storage_dtype == "fp8",
        compressed=config.storage_compression == "zstd",
    )
    stores = {name: Store(job.layout.rows(name), there, kind) for name, there in rows.items()}
    lengths = {name: prepared.lengths for name, prepared in rows.items()}
    missing = sum(len(store.missing()) for store in stores.values())
    for name, store in stores.items():
        for file, reason in list(store.altered.items())[:SHOWN]:
            job.events.note(f"{name}/{file}: {reason}; its rows are extracted again")
    speed = 0.0
    if missing or not all(file.is_file() for s in stores.values() for file in s.lists):
        _check_space(job, kind, stores, lengths)
        _look_ahead(job)
        job.events.doing("loading the verifier")
        with _generator(job) as generator:
            _check_workers(job)
            prefill = Prefill(generator, kind, config.sink_buffers)
            speed = _extract(job, prefill, stores, lengths)
            for dataset in job.datasets:
                store = stores[dataset.name]
                store.finish(_data_config(job, generator, dataset, store), lengths[dataset.name])
    outputs = {
        job.layout.relative(file): atomic.sha256(file)
        for store in stores.values()
        for file in store.lists
        if file.name != rows_index.NAME  # its lines have checksums of their own
    }
    bad = sum(len(store.bad) for store in stores.values())
    if bad:
        job.events.note(f"{bad} rows failed their proof and are left out; see gen/*/{BAD_ROWS}")
    return Extracted(
        digest=digest_of({name: store.index.digest() for name, store in stores.items()}),
        outputs=outputs,
        bytes=sum(store.index.bytes for store in stores.values()),
        rows=sum(map(len, rows.values())) - bad,
        bad_rows=bad,
        rows_written=missing,
        tokens=sum(map(sum, lengths.values())),
        tokens_per_second=round(speed, 1),
        layer_ids=config.layer_ids,
    )


@contextmanager
def _generator(job: Job) -> Iterator[Any]:
    config = job.config
    generator = VllmHiddenStatesGenerator(
        model_path=config.model,
        layer_ids=list(config.layer_ids),
        # It keeps one token less than this of each row, to sample one.
        max_model_len=config.seq_length + 1,
        gpu_memory_utilization=config.gpu_memory_utilization,
        tensor_parallel_size=config.tensor_parallel_size,
    )
    try:
        yield generator
    finally:
        generator.executor.shutdown()


def _check_workers(job: Job) -> None:
    """Every worker must have its required patches in place, or its rows may be wrong in silence."""
    outcomes = spec_compat.report().outcomes
    required = {outcome.id for outcome in outcomes if outcome.is_asked_for("worker", "extract")}
    reports = os.environ.get("SPEC_COMPAT_REPORT_DIR", job.layout.patch_reports("extract"))
    whole = Report.merge(reports).processes_with(required)
    if required and len(whole) < job.config.tensor_parallel_size:
        raise UserError(
            f"{len(whole)} of {job.config.tensor_parallel_size} vLLM workers have the patches "
            f"{', '.join(sorted(required))} in place; is spec_compat excluded by VLLM_PLUGINS?"
        )


def _check_space(
    job: Job, kind: RowFiles, stores: dict[str, Store], lengths: dict[str, list[int]]
) -> None:
    """Refuse what the disk does not hold, before minutes are spent on loading the verifier."""
    config = job.config
    hidden = job.verifier.geometry.hidden_size
    # vLLM computes in 16 bits, also where the weights are in float32.
    width = kind.token_bytes(len(config.layer_ids), hidden, torch.bfloat16)
    tokens = sum(lengths[name][row] for name, store in stores.items() for row in store.missing())
    needed = tokens * (width + 16) * OVERHEAD
    there = sum(store.index.bytes for store in stores.values())
    disk.refuse_beyond(job.config.max_disk, job.layout.gen, there + needed)
    free = shutil.disk_usage(job.layout.gen).free
    if needed > free:
        raise UserError(
            f"--output {job.layout.root}: {tokens:,} tokens need {size(needed)}, "
            f"{size(free)} are free; make space, or take fewer rows with --max-samples"
        )
    _check_buffers(config.sink_buffers, width, max(MIN_MAX_BATCHED_TOKENS, config.seq_length + 1))


def _check_buffers(asked: int | None, token_bytes: int, tokens: int) -> None:
    """Refuse what memory does not hold: the sink makes all of them before the first row."""
    buffers = buffer_count(tokens * token_bytes, asked)
    needed, free = buffers * tokens * token_bytes, psutil.virtual_memory().available
    if needed > free:
        raise UserError(
            f"--sink-buffers {buffers}: as many steps of {tokens:,} tokens take {size(needed)} of "
            f"memory, {size(free)} are free; take fewer, or a smaller --seq-length"
        )


def _look_ahead(job: Job) -> None:
    """Say now where the train stage will stop; the states may be wanted without a head."""
    try:
        targets.refuse(job.verifier)
    except UserError as error:
        job.events.note(f"the train stage will stop: {error}")


def _extract(
    job: Job, prefill: Prefill, stores: dict[str, Store], lengths: dict[str, list[int]]
) -> float:
    """Have everything written that is missing; returns the tokens computed a second."""
    allowed = job.config.max_bad_rows if job.config.on_bad_row == "skip" else 0
    by_directory = {str(store.directory): store for store in stores.values()}
    total = sum(map(len, lengths.values()))
    done = total - sum(len(store.missing()) for store in stores.values())
    computed, begun = 0, time.monotonic()
    model = prefill.generator.vllm_config.model_config
    pause = job.config.on_full_disk == "pause"
    storage = next(iter(stores.values())).storage
    width = storage.token_bytes(
        len(prefill.generator.layer_ids), model.get_hidden_size(), model.dtype
    )
    # Steps of which nothing is on the disk when the next one is sent, and that one.
    in_flight = buffer_count(prefill.tokens * width, job.config.sink_buffers) + AHEAD + 1
    job.events.doing("extracting", total)

    def steps() -> Iterator[Step]:
        nonlocal computed
        for name, store in stores.items():
            packed = pack(lengths[name], prefill.tokens, job.config.batch_size)
            for step in store.steps(packed):
                tokens = sum(lengths[name][row] for row in step.rows)
                needed = in_flight * OVERHEAD * (width + 16) * tokens
                if disk.wait_for(store.directory, needed, pause, job.events):
                    job.events.doing("extracting", total)
                yield step
                computed += sum(lengths[name][row] for row in step.rows)

    for answer in prefill.run(steps()):
        if answer.failure is not None:
            raise _failure(job, *answer.failure)
        for written in answer.written:
            by_directory[written.directory].written(written)
            done += len(written.rows)
        for refused in answer.refused:
            by_directory[refused.directory].refuse({refused.row: refused.reason}, allowed)
        job.events.progress(done, computed)
    if left := {n: store.missing() for n, store in stores.items() if store.missing()}:
        raise RuntimeError(f"not everything was written; missing rows by dataset: {left}")
    return computed / (time.monotonic() - begun)


def _failure(job: Job, number: int, text: str) -> Exception:
    """What a writer in the worker stopped at."""
    if fault := disk.as_user_error(OSError(number, text, str(job.layout.gen)), job.layout.root):
        return fault
    return RuntimeError(f"a row could not be written: {text}")


def _data_config(job: Job, generator: Any, dataset: Dataset, store: Store) -> dict[str, Any]:
    content: dict[str, Any] = DataGenerationConfig.from_generator(
        generator=generator,
        train_data_path=dataset.source,
        seq_length=job.config.seq_length,
        cache_dir=str(job.layout.prepared(dataset.name)),
        num_samples=len(store.prepared) - len(store.bad),
        max_samples=job.config.max_samples,
        seed=job.config.seed,
    ).to_dict()
    return content
