"""A resumed training is not the training that was interrupted.

Symptom  After a resume the loss curve leaves that of an uninterrupted run: global_step starts at 0
         again, the learning rate of the first step is that of an early warm-up step, the weights
         are those of the checkpoint rounded to bfloat16, and dropout and noise repeat those of the
         first epochs.
Cause    A checkpoint has neither the step, nor the weights in the trainer's dtype, nor the state of
         the random number generators. The scheduler is made with `last_epoch` in epochs, which
         sets the optimizer's learning rate; `load_state_dict` does not set it again.
Fix      `training_state.pt` lies beside the other files and has the missing parts,
         `random_state_<rank>.pt` those of each rank. `setup_optimizer` takes them back and sets
         the learning rate from the scheduler. A checkpoint without them resumes as before, but
         with the right step and learning rate.
Remove when speculators 0.3 and 0.4 are no longer supported.
"""

import random
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

from spec_compat.patching import NEEDED, Patch, Probe, moved, parameters

STATE = "training_state.pt"

patch = Patch(module="speculators.train.trainer", when={"speculators": ">=0.3,<0.5"})


@patch.probe
def needed(module: ModuleType) -> Probe:
    if parameters(module.Trainer.save_checkpoint) != {"self", "epoch"}:
        return moved("Trainer.save_checkpoint takes other parameters")
    return NEEDED


@patch.replace("Trainer.save_checkpoint")
def save(original: Callable[..., None], module: ModuleType) -> Callable[..., None]:
    @wraps(original)
    def save_checkpoint(self: Any, epoch: int) -> None:
        import torch

        original(self, epoch)
        directory = self.checkpointer.path / str(epoch)
        rank = module.dist.get_rank() if self.is_distributed else 0
        state = {"global_step": self.global_step, "model": _weights(self)}
        if rank == 0:
            torch.save(state, directory / STATE)
        torch.save(_random_state(self.train_loader), _random_file(directory, rank))

    return save_checkpoint


@patch.replace("Trainer.setup_optimizer")
def setup(original: Callable[..., None], module: ModuleType) -> Callable[..., None]:
    @wraps(original)
    def setup_optimizer(self: Any) -> None:
        original(self)
        if not self.resume_from_checkpoint or self.checkpointer.previous_epoch == -1:
            return
        if self.scheduler is not None:
            for group, rate in zip(
                self.opt.param_groups, self.scheduler.get_last_lr(), strict=True
            ):
                group["lr"] = rate
            self.global_step = self.scheduler.last_epoch
        rank = module.dist.get_rank() if self.is_distributed else 0
        _take_back(self, self.checkpointer.prev_path, rank)

    return setup_optimizer


def _take_back(trainer: Any, directory: Path, rank: int) -> None:
    import torch
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    if not (directory / STATE).is_file():
        return
    state = torch.load(directory / STATE, weights_only=True, map_location="cpu")
    trainer.global_step = state["global_step"]
    if trainer.is_distributed:
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
        set_model_state_dict(trainer.model, state["model"], options=options)
    else:
        trainer.model.load_state_dict(state["model"], strict=False)
    if _random_file(directory, rank).is_file():
        _set_random_state(
            torch.load(_random_file(directory, rank), weights_only=True), trainer.train_loader
        )


def _weights(trainer: Any) -> dict[str, Any]:
    """What is trained, in its own dtype; with several ranks only rank 0 gets it whole."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    trained = {name for name, weight in trainer.model.named_parameters() if weight.requires_grad}
    weights = trainer.model.state_dict()
    if trainer.is_distributed:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(trainer.model, options=options)
    return {name: weight for name, weight in weights.items() if name in trained}


def _random_file(directory: Path, rank: int) -> Path:
    return directory / f"random_state_{rank}.pt"


def _random_state(loader: Any) -> dict[str, Any]:
    import numpy as np
    import torch

    numpy: Any = np.random.get_state(legacy=False)
    key = torch.from_numpy(numpy["state"]["key"].astype(np.int64))
    state = {
        "python": random.getstate(),
        "numpy": {**numpy, "state": {**numpy["state"], "key": key}},
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    if getattr(loader, "generator", None) is not None:
        state["loader"] = loader.generator.get_state()
    return state


def _set_random_state(state: dict[str, Any], loader: Any) -> None:
    import numpy as np
    import torch

    random.setstate(state["python"])
    numpy = state["numpy"]
    key = numpy["state"]["key"].numpy().astype(np.uint32)
    np.random.set_state({**numpy, "state": {**numpy["state"], "key": key}})
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "loader" in state and getattr(loader, "generator", None) is not None:
        loader.generator.set_state(state["loader"])
