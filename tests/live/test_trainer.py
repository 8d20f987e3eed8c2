"""The pipeline's trainer: it waits for space, and no broken loss gets past it."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import spec_compat  # noqa: F401
from spec_compat.pipeline.run.events import Events
from spec_compat.pipeline.stages.trainer import GuardedTrainer
from spec_compat.pipeline.stages.training import Metrics
from speculators.train.trainer import TrainerConfig
from tests.live import resume

pytestmark = [pytest.mark.live, pytest.mark.slow]

Make = Callable[..., GuardedTrainer]


@pytest.fixture
def trainer(tiny_llama: Path, tmp_path: Path) -> Make:
    """A trainer of a small head for one epoch of three steps; `alter` changes each row first."""

    def make(wait_for: Any = print, alter: Any = None) -> GuardedTrainer:
        files = resume.rows(tmp_path / "rows")
        for file in files if alter else ():
            row = torch.load(file)
            alter(row)
            torch.save(row, file)
        call = {"ttt_steps": 2, "ttt_step_loss_decay": 1.0, "use_off_policy_tokens": False}
        config = TrainerConfig(
            lr=1e-2,
            num_epochs=1,
            save_path=str(tmp_path / "checkpoints"),
            train_call_kwargs=call,
            val_call_kwargs=call,
        )
        loader = resume.loader(files, None)
        head = resume.head(str(tiny_llama))
        return GuardedTrainer(head, config, loader, loader, wait_for=wait_for)

    return make


@pytest.fixture
def unlogged() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_a_checkpoint_waits_for_space_for_all_of_it(trainer: Make, tmp_path: Path) -> None:
    """The head in bfloat16, what is trained in float32, and the optimizer's two moments of it."""
    waited: list[tuple[int, bool]] = []
    saved = tmp_path / "checkpoints/0"
    it = trainer(lambda needed: waited.append((needed, saved.exists())))
    it.run_training()
    weights = list(it.model.parameters())
    trained = sum(w.numel() for w in weights if w.requires_grad)
    assert waited == [(2 * sum(w.numel() for w in weights) + 3 * 4 * trained, False)]
    assert saved.is_dir()


@pytest.mark.usefixtures("unlogged")
def test_a_loss_that_is_no_number_is_an_error_whatever_is_logged(
    trainer: Make, tmp_path: Path
) -> None:
    def alter(row: dict[str, Any]) -> None:
        row["hidden_states"][0][:] = torch.nan

    with pytest.raises(RuntimeError, match="the loss is nan in step 1"):
        trainer(alter=alter).run_training()
    assert not (tmp_path / "checkpoints/0").exists()


def test_the_last_step_of_an_epoch_is_looked_at_too(trainer: Make, tmp_path: Path) -> None:
    it, steps = trainer(), list[int]()

    def broken(model: Any, inputs: Any, output: Any) -> Any:
        steps.append(1)
        return (output[0], output[1] * torch.inf, output[2]) if len(steps) == 3 else output

    it.model.register_forward_hook(broken, prepend=True)
    with pytest.raises(RuntimeError, match="in step 3"):
        it.run_training()
    assert not (tmp_path / "checkpoints/0").exists()


def test_metrics_are_kept_whatever_the_level_of_the_log_was(trainer: Make, tmp_path: Path) -> None:
    logger = logging.getLogger("speculators.metrics")
    logger.setLevel(logging.ERROR)
    layout: Any = SimpleNamespace(metrics=tmp_path / "metrics.jsonl")
    metrics = Metrics(Events(), layout, 0)
    metrics.plan(1, 3, 240)
    try:
        metrics.listen()
        trainer().run_training()
    finally:
        logger.removeHandler(metrics)
    assert metrics.steps == 3
    assert len(layout.metrics.read_text().splitlines()) == 4
