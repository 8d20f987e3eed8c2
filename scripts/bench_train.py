#!/usr/bin/env python3
"""Training steps of a draft head: speculators' trainer as it is, and with each patch for its speed.

    python -m scripts.bench_train           # Qwen3-8B's shapes, on a GPU
    python -m scripts.bench_train --tiny    # seconds, on a CPU

Cases, each a process of its own, over the same random states in packed rows, on the device before
the first step:
  speculators   the trainer as it is, in float32
  tf32          with products of matrices in TF32
  autocast      in bfloat16, with weights and optimizer in float32
  attention     and queries and keys in the dtype of the values
  optimizer     and AdamW fused
  loss          and the loss at the positions that have one, in pieces
  waits         and nothing that waits for the GPU: metrics come late, the host knows the mask
  all           and less memory: frozen weights in bfloat16, gradients freed early
  float32       all patches, in float32
`mib` is the most that the steps held, of the GPU's memory or, on a CPU, of the process.
`waits` are those for the GPU in a step, `mhz` and `watts` what it ran at: one that may draw no more
power runs slower the longer it runs. `graphs` are what torch compiled, `again` what it compiled for
a second epoch with other rows and masks.
"""

from __future__ import annotations

import argparse
import logging
import os
import resource
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from scripts import gpu_profile, measure

OURS = (
    "precision",
    "attention-dtype",
    "fused-optimizer",
    "masked-loss",
    "late-metrics",
    "frozen-weights",
    "gradients",
    "tf32",
)
# What a case has, of OURS, and the precision.
CASES: dict[str, tuple[tuple[str, ...], str]] = {
    "speculators": ((), "float32"),
    "tf32": (("tf32",), "tf32"),
    "autocast": (OURS[:1], "bf16"),
    "attention": (OURS[:2], "bf16"),
    "optimizer": (OURS[:3], "bf16"),
    "loss": (OURS[:4], "bf16"),
    "waits": (OURS[:5], "bf16"),
    "all": (OURS, "bf16"),
    "float32": (OURS, "float32"),
}
PEAK = 989e12  # dense bfloat16 FLOP/s of an H100 or H200, by its data sheet
DRAFT_VOCAB_SIZE = 32_000
TINY = {"hidden_size": 64, "vocab_size": 2048, "tokens": 512, "steps": 3}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden-size", type=measure.count, default=4096)
    parser.add_argument("--vocab-size", type=measure.count, default=151936)
    parser.add_argument("--tokens", type=measure.count, default=8192, help="tokens of a batch")
    parser.add_argument("--rows", type=measure.count, default=4, help="rows of a batch")
    parser.add_argument("--learnt", type=float, default=1.0, help="share of a row that is learnt")
    parser.add_argument("--ttt-steps", type=measure.count, default=3)
    parser.add_argument("--teacher", action="store_true", help="--use-off-policy-tokens")
    parser.add_argument("--steps", type=measure.count, default=12, help="steps that are timed")
    parser.add_argument("--batches", type=measure.count, default=2, help="different ones")
    parser.add_argument("--profile", action="store_true", help="two steps more, to the case's log")
    parser.add_argument("--tiny", action="store_true", help="a head of 64, batches of 512 tokens")
    measure.scratch(parser)
    given = measure.options(parser, tuple(CASES))
    if given.tiny:
        vars(given).update(TINY)
    if given.case:
        run_case(given)
    records = measure.run_cases(given)
    shown = ("case", "ms", "tokens_per_second", "of_peak", "mib", "waits", "mhz", "watts")
    measure.table(records, (*shown, "first_s", "graphs", "again"))
    for record in records:
        print(record["case"], record.get("failed") or record["losses"])
    measure.finish("train", given, records, ratios(records))
    return any("failed" in record for record in records)


def ratios(records: list[measure.Record]) -> dict[str, float]:
    """How many times as fast, and in what share of the memory, against speculators."""
    of = {record["case"]: record for record in records if "ms" in record}
    base = of.pop("speculators", None)
    if base is None:
        return {}
    speed = {f"{case}/speculators in speed": base["ms"] / r["ms"] for case, r in of.items()}
    memory = {f"{case}/speculators in memory": r["mib"] / base["mib"] for case, r in of.items()}
    return speed | memory


def run_case(given: argparse.Namespace) -> None:
    patches, dtype = CASES[given.case]
    off = ",".join(f"train/{patch}" for patch in OURS if patch not in patches)
    os.environ.update(SPEC_COMPAT_DISABLE=off, SPEC_COMPAT_TRAIN_DTYPE=dtype)
    import spec_compat

    spec_compat.arm()
    import torch

    cuda = torch.cuda.is_available()
    batches = Batches(given, torch.device("cuda" if cuda else "cpu"))
    trainer, losses = new_trainer(given, batches)
    spec_compat.require(stage="train", scope="driver")

    first = epoch(trainer, batches, 1)
    warm = epoch(trainer, batches, 2) + first
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    with gpu_profile.Watched() as gpu:
        seconds = epoch(trainer, batches, given.steps) / given.steps
    memory = torch.cuda.max_memory_allocated() if cuda else 1024 * resident()
    waits = waits_of_a_step(trainer, batches) if cuda else 0
    graphs = compiled()
    batches.other()
    epoch(trainer, batches, len(batches.kept))
    if given.profile:
        print(gpu_profile.profile(lambda: epoch(trainer, batches, 2)), flush=True)
    speed = given.tokens / seconds
    measure.record(
        case=given.case,
        ms=1000 * seconds,
        tokens_per_second=speed,
        of_peak=speed * flops_of_a_token(given) / PEAK,
        mib=memory >> 20,
        waits=waits,
        **gpu.medians(),
        first_s=first,
        warm_s=warm,
        graphs=graphs,
        again=compiled() - graphs,
        losses=[round(loss, 4) for loss in losses[:3] + losses[-1:]],
        curve=[round(loss, 5) for loss in losses],
    )
    sys.stdout.flush()
    os._exit(0)


def flops_of_a_token(given: argparse.Namespace) -> float:
    """Of matrix products, forward and backward; attention's own are left out."""
    width, drafted = given.hidden_size, min(DRAFT_VOCAB_SIZE, given.vocab_size)
    layer = 2 * width * (width + 2 * width // 4) + width * width + 9 * width * width
    trained = given.ttt_steps * (layer + width * drafted)
    return float(6 * trained + 4 * 3 * width * width + 2 * width * drafted)


def epoch(trainer: Any, batches: Batches, steps: int) -> float:
    """Seconds of an epoch of that many steps."""
    import torch

    batches.steps = steps

    def synchronize() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    synchronize()
    begun = time.perf_counter()
    trainer.train_epoch(0)
    synchronize()
    return time.perf_counter() - begun


def waits_of_a_step(trainer: Any, batches: Batches) -> float:
    """How often a step waits for what it started on the GPU."""
    import torch

    steps = 4
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        batches.steps = steps
        trainer.train_epoch(0)
        torch.cuda.set_sync_debug_mode("default")
    found = [w for w in caught if "synchroniz" in str(w.message)]
    for line in sorted({f"waits at {w.filename}:{w.lineno}" for w in found}):
        print(line)
    return len(found) / steps


def compiled() -> int:
    import torch

    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def new_trainer(given: argparse.Namespace, batches: Batches) -> tuple[Any, list[float]]:
    """speculators' trainer on a new head, and the losses that it logs."""
    import torch
    from speculators.train.trainer import Trainer, TrainerConfig

    from scripts import bench_loader
    from spec_compat.pipeline.inputs.verifier import Verifier
    from spec_compat.pipeline.stages.training import draft_head

    verifier: Path = given.scratch / "verifier"
    if not (verifier / "t2d.npy").exists():
        bench_loader.verifier(given, verifier)
    torch.manual_seed(0)  # the same head, whether or not a verifier was made
    job: Any = SimpleNamespace(
        verifier=Verifier(str(verifier)),
        config=SimpleNamespace(
            model=str(verifier),
            layer_ids=(2, 4, 5, 7),
            ttt_steps=given.ttt_steps,
            num_layers=1,
            draft_heads=None,
            draft_kv_heads=max(1, given.hidden_size // 512),
            draft_head_dim=None,
            draft_intermediate_size=None,
        ),
        layout=SimpleNamespace(vocab_mapping=verifier),
    )
    call = {"ttt_steps": given.ttt_steps, "ttt_step_loss_decay": 1.0}
    options = TrainerConfig(
        lr=1e-4,
        num_epochs=1,
        save_path=str(given.scratch / "heads"),
        scheduler_type="none",
        train_call_kwargs={**call, "use_off_policy_tokens": given.teacher},
    )
    trainer = Trainer(draft_head(job), options, batches)
    logger = logging.getLogger("speculators.metrics")
    logger.setLevel(logging.INFO)
    logger.addHandler(losses := Losses())
    return trainer, losses.found


class Losses(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[float] = []

    def emit(self, record: logging.LogRecord) -> None:
        message: Any = record.msg
        self.found.append(message["train"]["loss"])


class Batches:
    """`steps` batches, the same for the same seed: the verifier's last state is half of what the
    head is given, so that there is something to learn."""

    def __init__(self, given: argparse.Namespace, device: Any) -> None:
        self._given, self._device, self.steps = given, device, 0
        self.batch_sampler = None
        rows = [given.tokens // given.rows] * given.rows
        self.kept = [self._made(seed, rows) for seed in range(given.batches)]

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for step in range(self.steps):
            yield self.kept[step % len(self.kept)]

    def other(self) -> None:
        """Other numbers of rows, and of positions that are learnt; the last batch is short."""
        half = self._given.tokens // 2
        for seed, rows in enumerate(([half // 8] * 15, [half // 5] * 5)):
            batch = self._made(seed, rows)
            batch["loss_mask"][:, 10 : 200 * (seed + 1)] = False
            batch.update(self._learnt(batch["loss_mask"][0]))
            self.kept[seed % len(self.kept)] = batch

    def _made(self, seed: int, rows: list[int]) -> dict[str, Any]:
        import torch

        given, device = self._given, self._device
        generator = torch.Generator(device).manual_seed(seed)
        shape = (1, given.tokens, 4 * given.hidden_size)
        states = torch.randn(shape, device=device, generator=generator)
        given_states, last = states.split([3 * given.hidden_size, given.hidden_size], dim=-1)
        last = 0.7 * given_states[..., -given.hidden_size :] + 0.7 * last
        places = torch.cat([torch.arange(row, device=device) for row in rows])
        ends = torch.tensor(rows, device=device).repeat_interleave(
            torch.tensor(rows, device=device)
        )
        learnt = places >= (1 - given.learnt) * ends
        pad = (0, given.tokens - len(places))
        return {
            "hidden_states": given_states.contiguous(),
            "verifier_last_hidden_states": last.contiguous(),
            "input_ids": torch.randint(
                0, given.vocab_size, (1, given.tokens), device=device, generator=generator
            ),
            "lengths": torch.tensor(rows, device=device),
            "loss_mask": torch.nn.functional.pad(learnt, pad)[None],
            "position_ids": torch.nn.functional.pad(places, pad)[None],
            **self._learnt(torch.nn.functional.pad(learnt, pad)),
        }

    def _learnt(self, mask: Any) -> dict[str, Any]:
        """The mask on the host, for the cases in which nothing waits for the GPU."""
        if "late-metrics" not in CASES[self._given.case][0]:
            return {}
        return {"learnt": mask.cpu().numpy()}


if __name__ == "__main__":
    sys.exit(main())
