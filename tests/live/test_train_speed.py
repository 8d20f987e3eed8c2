"""The patches that train at the speed of a GPU: what of them can be seen without one."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import spec_compat  # noqa: F401
from spec_compat.patches.train import (
    frozen_weights,
    fused_optimizer,
    late_metrics,
    sharded_precision,
)
from spec_compat.precision import train_dtype
from tests.live.test_masked_loss import MASKS, batch
from tests.live.test_train_patches import new_head

pytestmark = pytest.mark.live


class Arrival:
    """A CUDA event that is asked whether it has come, and made to come by waiting for it."""

    def __init__(self) -> None:
        self.come = False

    def query(self) -> bool:
        return self.come

    def synchronize(self) -> None:
        self.come = True


class Logged:
    def __init__(self) -> None:
        self.messages: list[tuple[Any, Any]] = []

    def info(self, message: Any, extra: Any = None) -> None:
        self.messages.append((message, extra))


def step(loss: float, arrival: Arrival) -> dict[str, Any]:
    late = late_metrics.Late(torch.tensor([loss]), 0, arrival)
    return {"train": {"loss": late.item()}, "epoch": 0}


def test_metrics_are_logged_in_order_when_they_have_come() -> None:
    logged = Logged()
    logger = late_metrics.InOrder(logged)
    arrivals = [Arrival() for _ in range(3)]
    for number, arrival in enumerate(arrivals):
        logger.info(step(float(number), arrival), extra={"step": number})
    arrivals[1].come = True
    assert logged.messages == []
    arrivals[0].come = True
    logger.info({"val": {"loss": 7.0}})
    assert [message.get("train") for message, _ in logged.messages] == [{"loss": 0.0}, {"loss": 1}]
    logger.flush()
    assert [extra for _, extra in logged.messages] == [{"step": 0}, {"step": 1}, {"step": 2}, None]
    assert logged.messages[-1][0] == {"val": {"loss": 7.0}}


def test_a_loss_is_at_most_so_many_steps_late() -> None:
    logged = Logged()
    logger = late_metrics.InOrder(logged)
    for number in range(20):
        logger.info(step(float(number), Arrival()))
        assert number + 1 - len(logged.messages) <= late_metrics.STEPS_LATE


class Module:
    """speculators.train.trainer, as far as train/late-metrics looks at it."""

    torch = torch

    def __init__(self) -> None:
        self.metric_logger = late_metrics.InOrder(logging.getLogger("test_train_speed"))


def test_a_loss_that_is_no_number_ends_the_epoch_before_a_checkpoint_is_written() -> None:
    class Refuses(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            message: Any = record.msg
            if message["train"]["loss"] != message["train"]["loss"]:
                raise RuntimeError("the loss is nan")

    module: Any = Module()
    logger = logging.getLogger("test_train_speed")
    logger.setLevel(logging.INFO)
    logger.addHandler(Refuses())

    def original(self: Any, epoch: int) -> None:
        module.metric_logger.info(step(float("nan"), Arrival()))

    class Trainer:
        model = torch.nn.Linear(1, 1)

    epoch: Any = late_metrics.train(original, module)
    with pytest.raises(RuntimeError, match="the loss is nan"):
        epoch(Trainer(), 0)


def test_the_mask_on_the_host_gives_the_same_losses(tiny_llama: Path) -> None:
    torch.manual_seed(0)
    head = new_head(tiny_llama).double()
    given = batch(MASKS["packed rows"])
    _, expected, metrics = head(**given)
    _, found, same = head(**given, learnt=(given["loss_mask"][0] != 0).numpy())
    assert found == expected
    assert same == metrics


def test_only_weights_that_lose_nothing_become_bfloat16() -> None:
    exact = torch.nn.Parameter(torch.tensor([1.0, 0.5]), requires_grad=False)
    other = torch.nn.Parameter(torch.tensor([1.0, 1 / 3]), requires_grad=False)
    for weight in (exact, other):
        frozen_weights.narrow(torch, weight)
    assert exact.dtype == torch.bfloat16
    assert other.dtype == torch.float32


def test_a_resumed_group_is_fused_with_its_step_counters() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.AdamW([parameter])
    parameter.grad = torch.ones(2)
    optimizer.step()
    fused_optimizer.fuse(optimizer.param_groups[0], optimizer.state)
    optimizer.step()
    assert optimizer.state[parameter]["step"] == 2


def test_sharding_casts_no_parameters() -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    made = sharded_precision.policy(MixedPrecisionPolicy, None)(param_dtype=torch.bfloat16)
    assert made.param_dtype is None


def test_the_precision_is_float32_without_a_gpu_and_what_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SPEC_COMPAT_TRAIN_DTYPE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert train_dtype(torch) == "float32"
    monkeypatch.setenv("SPEC_COMPAT_TRAIN_DTYPE", "tf32")
    assert train_dtype(torch) == "tf32"
    monkeypatch.setenv("SPEC_COMPAT_TRAIN_DTYPE", "fp16")
    with pytest.raises(ValueError, match="float32, tf32, bf16"):
        train_dtype(torch)
