"""Trains a tiny head with speculators' own trainer, and kills itself if it is asked to.

It logs into `metrics.jsonl` what the trainer logs, with the step.
"""

import json
import logging
import os
import signal
from pathlib import Path
from typing import Any

import spec_compat  # noqa: F401
import torch
import torch.distributed as dist
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from speculators.train.data import Eagle3SampleFileDataset, create_collate_fn
from speculators.train.noise_transforms import AddUniformNoise
from speculators.train.trainer import Trainer, TrainerConfig
from torch.utils.data import DataLoader
from transformers import LlamaConfig

ROWS, TOKENS, EPOCHS = 6, 40, 4


class Log(logging.Handler):
    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    def emit(self, record: Any) -> None:
        if isinstance(record.msg, dict):
            with self.file.open("a") as stream:
                stream.write(json.dumps({**record.msg, "step": record.step}) + "\n")


def rows(directory: Path) -> list[str]:
    directory.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(7)
    for index in range(ROWS):
        row = {
            "input_ids": torch.randint(0, 512, (TOKENS,), generator=generator),
            "loss_mask": torch.ones(TOKENS, dtype=torch.long),
            "hidden_states": [torch.randn(TOKENS, 64, generator=generator) for _ in range(4)],
        }
        torch.save(row, directory / f"data_{index}.pt")
    return [str(directory / f"data_{index}.pt") for index in range(ROWS)]


def head(verifier: str) -> Eagle3DraftModel:
    layer = LlamaConfig.from_pretrained(verifier, num_hidden_layers=1)
    layer._attn_implementation = "simple_flex_attention"
    t2d = torch.zeros(512, dtype=torch.bool)
    t2d[100:356] = True
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=256,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=2)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=verifier, architectures=[]),
        ),
    )
    model = Eagle3DraftModel(config, t2d=t2d, d2t=torch.full((256,), 100))
    if hasattr(model, "load_verifier_weights"):
        model.load_verifier_weights()
    return model


def loader(files: list[str], noise: Any) -> DataLoader[Any]:
    dataset = Eagle3SampleFileDataset(128, file_list=files, transform=noise)
    generator = torch.Generator().manual_seed(3)
    return DataLoader(
        dataset,
        batch_size=2,
        shuffle=True,
        num_workers=1,
        collate_fn=create_collate_fn(128),
        generator=generator,
    )


def as_a_gpu_would() -> None:
    """What the trainer asks of CUDA and NCCL in several ranks, and a CPU with Gloo has not."""
    to_empty, reduce = torch.nn.Module.to_empty, dist.reduce

    def to_empty_on_cpu(self: Any, *, device: Any, recurse: bool = True) -> Any:
        return to_empty(self, device="cpu" if device == "cuda" else device, recurse=recurse)

    def averaged(tensor: torch.Tensor, dst: int, op: Any) -> None:
        reduce(tensor, dst, op=dist.ReduceOp.SUM)
        tensor /= dist.get_world_size()

    torch.nn.Module.to_empty = to_empty_on_cpu
    dist.reduce = averaged


def main(verifier: str, run: Path, killed_at: str) -> None:
    torch.manual_seed(0)
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        dist.init_process_group("gloo")
        as_a_gpu_would()
    call = {"ttt_steps": 2, "ttt_step_loss_decay": 1.0, "use_off_policy_tokens": False}
    config = TrainerConfig(
        lr=1e-2,
        num_epochs=EPOCHS,
        save_path=str(run / "checkpoints"),
        resume_from_checkpoint=True,
        train_call_kwargs=call,
        val_call_kwargs=call,
        scheduler_warmup_steps=5,
        is_distributed=ranks > 1,
        local_rank=rank,
    )
    files = rows(run / f"rows_{rank}")
    logging.basicConfig(level=logging.INFO)
    if rank == 0:
        logging.getLogger("speculators.metrics").addHandler(Log(run / "metrics.jsonl"))
    mine = files[rank::ranks]
    train, validation = loader(mine, AddUniformNoise(0.5)), loader(mine[:2], None)
    torch.manual_seed(rank)  # noise is each rank's own
    trainer = Trainer(head(verifier), config, train, validation)
    logging.getLogger("speculators.metrics").setLevel(logging.INFO)
    if killed_at.startswith("epoch"):
        validate = trainer.val_epoch

        def kill(epoch: int) -> None:
            validate(epoch)
            if rank == 0 and epoch == int(killed_at.removeprefix("epoch")):
                os.kill(os.getpid(), signal.SIGKILL)

        trainer.val_epoch = kill
    elif killed_at:
        save = torch.save

        def half(content: Any, file: Any) -> None:
            """The second time that this file is written, only a part of it is."""
            save(content, file)
            if Path(file).name == killed_at and Path(file).parent.name == "1":
                os.truncate(file, Path(file).stat().st_size // 2)
                os.kill(os.getpid(), signal.SIGKILL)

        torch.save = half
    trainer.run_training()
