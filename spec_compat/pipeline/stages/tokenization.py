"""Conversations to token ids and loss masks, with speculators' own preprocessing."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets as hf
import numpy as np
from speculators.data_generation.preprocessing import load_and_preprocess_dataset

import spec_compat
from spec_compat.errors import UserError
from spec_compat.patching import ROW_COLUMN, Preparation, preparing
from spec_compat.pipeline.inputs import conversations
from spec_compat.pipeline.inputs.verifier import Verifier
from spec_compat.pipeline.run.events import Events
from spec_compat.pipeline.run.manifest import digest_of
from spec_compat.pipeline.run.plan import Dataset
from spec_compat.pipeline.run.stage import Job
from spec_compat.pipeline.stages.prepare import Prepared
from spec_compat.pipeline.system import atomic, bars

# Fewer rows than this are tokenized sooner by one process than by several that must be started.
ROWS_PER_PROCESS = 2000
BATCH = 1000


def run(job: Job) -> Prepared:
    """Write `prepared/<dataset>/`: columns input_ids and loss_mask, int64 of equal length a row."""
    spec_compat.require(stage="prepare", scope="driver")
    random.seed(job.config.seed)  # speculators draws from it where there is an assistant_pattern
    draws = random.Random(job.config.seed)  # noqa: S311
    check_loads(job.verifier)
    counts: Counter[str] = Counter()
    digests: dict[str, str] = {}
    outputs: dict[str, str] = {}
    size = 0
    for dataset in job.datasets:
        prepared = job.layout.prepared(dataset.name)
        # A cache of this run alone: a shared one would answer for a file that has changed since.
        scratch = prepared.with_name(".cache")  # short: its path becomes a file's name
        with atomic.replacing_directory(prepared) as directory, _emptied(scratch):
            found, digests[dataset.name] = prepare_dataset(job, dataset, directory, scratch, draws)
        counts.update(found)
        for file in sorted(job.layout.prepared(dataset.name).iterdir()):
            outputs[job.layout.relative(file)] = atomic.sha256(file)
            size += file.stat().st_size
    return Prepared(digest=digest_of(digests), outputs=outputs, bytes=size, parts=digests, **counts)


def check_loads(verifier: Verifier) -> None:
    """Raise UserError where the verifier's tokenizer, or a config of its own, cannot be loaded.

    Whatever that raises: code that comes with a model may do anything.
    """
    from transformers import AutoConfig, AutoTokenizer

    loads = {"config": AutoConfig, "tokenizer": AutoTokenizer}
    if not verifier.brings_code:  # a type that transformers does not know, vLLM may
        del loads["config"]
    for what, auto in loads.items():
        try:
            auto.from_pretrained(
                verifier.name_or_path, trust_remote_code=verifier.trust_remote_code
            )
        except Exception as error:
            if isinstance(error, OSError) and error.errno:  # of the disk
                raise
            cause = str(error).strip().partition("\n")[0] or type(error).__name__
            raise verifier.error(f"its {what} cannot be loaded: {cause}") from error


@contextmanager
def _emptied(scratch: Path) -> Iterator[None]:
    """A directory that is empty at first, and gone at the end: it takes more than the result."""
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        yield
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def prepare_dataset(
    job: Job, dataset: Dataset, directory: Path, scratch: Path, draws: random.Random
) -> tuple[Counter[str], str]:
    config, events = job.config, job.events
    counts: Counter[str] = Counter()
    source, workers = dataset.source, config.num_preprocessing_workers or min(8, _cpus())
    if dataset.is_local:
        source = str(scratch / f"{dataset.name}.jsonl")
        events.doing(f"reading {dataset.name}")
        counts = _write_conversations(Path(dataset.source), Path(source), events)
        workers = min(workers, 1 + counts["conversations"] // ROWS_PER_PROCESS)
    events.doing(f"tokenizing {dataset.name}")
    reported = job.layout.reported_rows(dataset.name)
    reported.unlink(missing_ok=True)
    try:
        with preparing(Preparation(reported, draws)), bars.reported(events, dataset.name):
            rows, _tokenizer = load_and_preprocess_dataset(
                target_model_path=config.model,
                train_data_path=source,
                seq_length=config.seq_length,
                build_dataset_num_proc=workers,
                seed=config.seed,
                max_samples=config.max_samples,
                token_freq_path=str(directory / "token_freq.pt"),
                cache_dir=str(config.hf_cache_dir or scratch / "hf"),
                assistant_pattern=config.assistant_pattern,
                turn_dropout=config.turn_dropout,
            )
    except (ValueError, IndexError) as error:
        raise UserError(f"{dataset.source}: cannot be prepared: {error}") from error
    if left_out := _reasons(reported):
        counts["left_out"] = sum(left_out.values())
        reasons = ", ".join(f"{number} x {reason}" for reason, number in left_out.most_common())
        events.note(f"{dataset.name}: rows left out: {reasons}; see {reported.name} in the logs")
    usable = rows.with_format("numpy").filter(_has_target, input_columns="loss_mask")
    if not len(usable):
        raise UserError(
            f"{dataset.source}: none of {len(rows)} rows has a token to train on within "
            f"{config.seq_length} tokens"
        )
    counts["untrainable"] = len(rows) - len(usable)
    counts["dropped"] += counts["untrainable"]
    if counts["untrainable"]:
        events.note(
            f"{dataset.name}: {counts['untrainable']} of {len(rows)} rows have no token to train "
            "on and were dropped"
        )
    largest, digest = _measure(usable, counts)
    known = job.verifier.geometry.vocab_size
    if largest >= known:  # vLLM's worker would end in the middle of them
        raise job.verifier.error(
            f"its tokenizer gives the id {largest}, and it has embeddings of {known} tokens, from "
            "0 on"
        )
    usable.with_format("torch").save_to_disk(directory)
    return counts, digest


def _write_conversations(source: Path, target: Path, events: Events) -> Counter[str]:
    """Write what speculators reads: one list of `conversations` a row."""
    counts: Counter[str] = Counter()
    with target.open("w", encoding="utf-8") as stream:
        for number, record in conversations.numbered(source):
            try:
                turns = conversations.turns(record)
            except conversations.UnusableError:
                counts["dropped"] += 1
                continue
            counts["conversations"] += 1
            row: dict[str, Any] = {"conversations": turns, ROW_COLUMN: number}
            if tools := record.get("tools"):
                row["tools"] = conversations.text(tools)
            stream.write(json.dumps(row, ensure_ascii=False) + "\n")
    if counts["dropped"]:
        events.note(f"{source}: {counts['dropped']} rows are no conversation and were dropped")
    return counts


def _reasons(reported: Path) -> Counter[str]:
    """Why the loss mask of some rows could not be told; one JSON object a row, with its reason."""
    if not reported.is_file():
        return Counter()
    lines = reported.read_text(encoding="utf-8").splitlines()
    return Counter(json.loads(line)["reason"] for line in lines)


def _has_target(loss_mask: np.ndarray[Any, Any]) -> bool:
    """The first two tokens are nobody's: the head is given one with the state before it."""
    return bool(loss_mask[2:].any())


def _measure(rows: hf.Dataset, counts: Counter[str]) -> tuple[int, str]:
    """Count rows and tokens; returns the largest id, and a digest of ids and masks.

    It is over what they are, not over how Arrow stores them.
    """
    digest, largest = hashlib.sha256(), 0
    for batch in rows.with_format("numpy").iter(batch_size=BATCH):
        for ids, mask in zip(batch["input_ids"], batch["loss_mask"], strict=True):
            largest = max(largest, int(ids.max()))
            counts["rows"] += 1
            counts["tokens"] += len(ids)
            counts["trainable_tokens"] += int(mask.sum())
            digest.update(len(ids).to_bytes(8, "little"))
            digest.update(np.ascontiguousarray(ids, np.int64).tobytes())
            digest.update(np.ascontiguousarray(mask, np.int64).tobytes())
    return largest, digest.hexdigest()


def _cpus() -> int:
    return len(os.sched_getaffinity(0))
