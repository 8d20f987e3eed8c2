"""Trains the draft head with speculators' trainer on the rows of all datasets."""

from __future__ import annotations

import json
import logging
import math
import random
import time
from functools import partial
from typing import Any

import numpy as np
import torch
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from speculators.train.trainer import TrainerConfig
from speculators.train.utils import maybe_destroy_distributed, maybe_setup_distributed
from transformers import LlamaConfig

import spec_compat
from spec_compat.errors import UserError
from spec_compat.pipeline.head import targets
from spec_compat.pipeline.head.acceptance import acceptance
from spec_compat.pipeline.head.geometry import mapping_problems, rope
from spec_compat.pipeline.rows import storage
from spec_compat.pipeline.rows.row import StoredRow
from spec_compat.pipeline.rows.store import stored
from spec_compat.pipeline.run.config import MASK_BLOCK, ResolvedConfig
from spec_compat.pipeline.run.events import Events
from spec_compat.pipeline.run.layout import Layout
from spec_compat.pipeline.run.manifest import digest_of
from spec_compat.pipeline.run.stage import Job
from spec_compat.pipeline.stages import checkpoints
from spec_compat.pipeline.stages.loader import loader, seed_everything
from spec_compat.pipeline.stages.train import Trained
from spec_compat.pipeline.stages.trainer import GuardedTrainer
from spec_compat.pipeline.system import atomic, disk
from spec_compat.precision import train_dtype

# Tokens of a batch where nothing asks for another size: attention on a CPU is dense.
BATCH_TOKENS = {"cuda": 8192, "cpu": 1024}
STEPS_PER_EPOCH = 8
# Rows whose targets are checked before training, and rows that the manifest names for check-head.
CHECKED_ROWS = 4
SERVED_ROWS = 32


def run(job: Job) -> Trained:
    """Write `checkpoints/<epoch>/`; goes on after the last epoch that is whole."""
    spec_compat.require(stage="train", scope="driver")
    job.events.doing("loading the draft head")
    local_rank, world_size, rank, is_distributed = maybe_setup_distributed()
    try:
        return _train(job, local_rank, world_size, rank, is_distributed)
    finally:
        maybe_destroy_distributed()


def _train(job: Job, local_rank: int, world_size: int, rank: int, is_distributed: bool) -> Trained:
    config, layout = job.config, job.layout
    train, validation = split(job, world_size)
    lengths = [row.length for row in train]
    total_seq_len = config.total_seq_len or batch_tokens(lengths)
    first_epoch = checkpoints.drop_unfinished(layout.checkpoints, config.epochs) if rank == 0 else 0
    if is_distributed:
        torch.distributed.barrier()
    seed_everything(config.seed)
    choices = targets.GreedyVerifier(job.verifier)
    model = draft_head(job)
    if rank == 0:
        targets.check(model, choices, last_states(train[:CHECKED_ROWS]))
    train_loader = loader(job, train, total_seq_len, world_size, rank, config.noise_std)
    validation_loader = loader(job, validation, total_seq_len, world_size, rank, 0)
    metrics = Metrics(job.events if rank == 0 else Events(), layout, first_epoch)
    metrics.plan(config.epochs, len(train_loader), sum(lengths))
    call = {"ttt_steps": config.ttt_steps, "ttt_step_loss_decay": config.ttt_step_loss_decay}
    pause = config.on_full_disk == "pause"
    wait_for = partial(disk.wait_for, layout.root, pause=pause, events=job.events)
    trainer = GuardedTrainer(
        model,
        TrainerConfig(
            lr=config.lr,
            num_epochs=config.epochs,
            save_path=str(layout.checkpoints),
            resume_from_checkpoint=True,
            is_distributed=is_distributed,
            local_rank=local_rank,
            train_call_kwargs={**call, "use_off_policy_tokens": config.use_off_policy_tokens},
            val_call_kwargs={**call, "use_off_policy_tokens": False},
        ),
        train_loader,
        validation_loader,
        wait_for=wait_for if rank == 0 else lambda needed: None,
    )
    if rank == 0:
        checkpoints.note_other_ranks(layout.checkpoints, first_epoch, world_size, job.events)
        metrics.listen()
    begun = time.monotonic()
    trainer.run_training()
    seconds = time.monotonic() - begun
    job.events.doing("measuring the head on the rows that were held out")
    accepted = acceptance(trainer.model, choices, validation_loader, config.ttt_steps)
    trained = (config.epochs - first_epoch) * sum(lengths)  # earlier processes did the rest
    files = sorted(file for file in layout.checkpoints.rglob("*") if file.is_file() and rank == 0)
    outputs = {layout.relative(file): atomic.sha256(file) for file in files}
    return Trained(
        digest=digest_of(outputs),
        outputs=outputs,
        bytes=sum(file.stat().st_size for file in files),
        rows=len(train),
        validation_rows=len(validation),
        tokens=config.epochs * sum(lengths),
        tokens_per_second=round(trained / seconds, 1),
        waited_for_data=round(train_loader.waited / seconds, 4),
        train_dtype=train_dtype(torch),
        epochs=config.epochs,
        steps=metrics.steps,
        ttt_steps=config.ttt_steps,
        total_seq_len=total_seq_len,
        validation=metrics.validation,
        acceptance=accepted.shares,
        following_acceptance=accepted.following,
        expected_acceptance_length=1 + sum(accepted.shares),
        own_answers=accepted.own,
        held_out=[str(row.ref) for row in validation[:SERVED_ROWS]],
    )


def split(job: Job, world_size: int) -> tuple[list[StoredRow], list[StoredRow]]:
    """Rows to train on and to validate with: the same on every machine, neither of them empty."""
    rows = list[StoredRow]()
    for dataset in job.datasets:
        rows += stored(job.layout.rows(dataset.name))
    if len(rows) < 2 * world_size:
        raise UserError(
            f"{len(rows)} rows are too few: {world_size} to train on and {world_size} to validate "
            "with are the least; give more --data"
        )
    random.Random(job.config.seed).shuffle(rows)  # noqa: S311
    kept = round(len(rows) * job.config.val_ratio)
    kept = min(max(kept, world_size), len(rows) - world_size)
    return rows[kept:], rows[:kept]


def batch_tokens(lengths: list[int]) -> int:
    """Tokens in a batch: it holds the longest row, and little data still makes several batches."""
    usual = BATCH_TOKENS["cuda" if torch.cuda.is_available() else "cpu"]
    wanted = max(max(lengths), min(usual, sum(lengths) // STEPS_PER_EPOCH))
    return math.ceil(wanted / MASK_BLOCK) * MASK_BLOCK


def last_states(rows: list[StoredRow]) -> torch.Tensor:
    loaded = (storage.load(row.file, row.ref.number).decoded() for row in rows)
    return torch.cat([row.hidden_states[-1] for row in loaded])


def draft_head(job: Job) -> Any:
    """A new head for the verifier, with the mapping of the map stage."""
    config = job.config
    mapping = job.layout.vocab_mapping
    offsets, drafted = np.load(mapping / "d2t.npy"), np.load(mapping / "t2d.npy")
    if problems := mapping_problems(offsets, drafted):
        raise UserError(f"{mapping}: {problems[0]}; make it again with --from map")
    d2t, t2d = torch.from_numpy(offsets), torch.from_numpy(drafted)
    head_config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer_config(job.verifier.hf_text_config, config),
        draft_vocab_size=len(d2t),
        norm_before_residual=True,
        # Captured after layer k; for vLLM an id means before that layer.
        eagle_aux_hidden_state_layer_ids=[layer_id + 1 for layer_id in config.layer_ids[:-1]],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=config.ttt_steps)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(
                name_or_path=config.model, architectures=list(job.verifier.architectures)
            ),
        ),
    )
    return Eagle3DraftModel(head_config, t2d=t2d, d2t=d2t)


def layer_config(verifier: Any, options: ResolvedConfig) -> LlamaConfig:
    """The head's decoder layer: a Llama layer of the run's geometry, the verifier's by default.

    `verifier` is the config of the language model, or of one wrapper around it.
    """
    text = verifier.get_text_config()
    theta, scaling = rope(text.to_dict())
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    config = LlamaConfig(
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=options.draft_intermediate_size or text.intermediate_size,
        num_hidden_layers=options.num_layers,
        num_attention_heads=options.draft_heads or text.num_attention_heads,
        num_key_value_heads=options.draft_kv_heads or text.num_key_value_heads,
        head_dim=options.draft_head_dim or width,
        hidden_act="silu",  # whatever the verifier's is: vLLM's Llama layer knows no other
        max_position_embeddings=text.max_position_embeddings,
        initializer_range=text.initializer_range,
        rms_norm_eps=getattr(text, "rms_norm_eps", None) or text.layer_norm_eps,
        rope_theta=theta or 10000.0,
        rope_scaling=scaling,
        tie_word_embeddings=False,
    )
    config._attn_implementation = "simple_flex_attention"
    return config


class Metrics(logging.Handler):
    """Turns what the trainer logs into progress, and keeps it in logs/metrics.jsonl."""

    def __init__(self, events: Events, layout: Layout, first_epoch: int) -> None:
        super().__init__()
        self._events = events
        self._path = layout.metrics
        self.records = checkpoints.kept_metrics(layout.metrics, first_epoch)
        self._steps = self._epochs = 0
        self._first = self._done = self.steps
        self._tokens_per_step = 0.0

    def plan(self, epochs: int, steps_per_epoch: int, tokens_per_epoch: int) -> None:
        self._epochs = epochs
        self._steps = epochs * steps_per_epoch
        self._tokens_per_step = tokens_per_epoch / steps_per_epoch
        self._events.doing("training", self._steps, "steps")

    def listen(self) -> None:
        """Be told from now on, whatever the level of the log is."""
        logger = logging.getLogger("speculators.metrics")
        logger.addHandler(self)
        logger.setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        if not isinstance(record.msg, dict):
            return
        message: dict[str, Any] = record.msg
        self.records.append(message)
        with self._path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(message) + "\n")
        if "train" not in message:
            return
        self._done += 1
        self._events.progress(
            self._done,
            round((self._done - self._first) * self._tokens_per_step),
            f"epoch {message['epoch'] + 1}/{self._epochs}, loss {message['train']['loss']:.3f}  ",
        )

    @property
    def steps(self) -> int:
        return sum("train" in record for record in self.records)

    @property
    def validation(self) -> dict[str, float]:
        """The last validation, by the names of the training metrics; empty if its log is gone."""
        last: dict[str, float] = next(
            (record["val"] for record in reversed(self.records) if "val" in record), {}
        )
        return {name.removesuffix("_epoch"): value for name, value in last.items()}
