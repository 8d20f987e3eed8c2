"""Each training step waits for the GPU, to log its metrics.

Symptom  None but the time: the GPU has nothing to do while the next step is prepared, 12 ms of 117
         (Qwen3-8B's shapes, one H200).
Cause    `train_epoch` calls `.item()` on each of the metrics of a step, and with several GPUs
         reduces each by itself.
Fix      The metrics of a step are copied to the host as one tensor while the next steps run, and
         logged as they arrive: in order, at most STEPS_LATE steps late, and all of them before the
         epoch ends. So a loss that is not finite is found before a checkpoint is written. On a CPU
         nothing changes.
Remove when speculators 0.3 and 0.4 are no longer supported.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

from spec_compat.patching import NEEDED, Patch, Probe, mentions, moved

STEPS_LATE = 8

patch = Patch(
    module="speculators.train.trainer",
    when={"speculators": ">=0.3,<0.5"},
    severity="optional",
    after=("train/fused-optimizer", "train/tf32"),
)


@patch.probe
def needed(module: ModuleType) -> Probe:
    if {"item", "metric_logger"} <= mentions(module.Trainer.train_epoch):
        return NEEDED
    return moved("Trainer.train_epoch does not ask each metric for its number")


@patch.replace("Trainer.train_epoch")
def train(original: Callable[..., None], module: ModuleType) -> Callable[..., None]:
    @wraps(original)
    def train_epoch(self: Any, epoch: int) -> None:
        def late(model: Any, args: Any, output: Any) -> Any:
            drafts, loss, metrics = output
            if not loss.is_cuda:
                return output
            return drafts, loss, on_the_way(module, metrics, self.is_distributed)

        hook = self.model.register_forward_hook(late)
        try:
            original(self, epoch)
        finally:
            hook.remove()
        module.metric_logger.flush()

    return train_epoch


@patch.replace("metric_logger")
def logger(original: Any, module: ModuleType) -> Any:
    return InOrder(original)


@patch.replace("dist")
def distributed(original: Any, module: ModuleType) -> Any:
    return Reduced(original)


class Reduced:
    """torch.distributed, but for metrics that are reduced already."""

    def __init__(self, distributed: Any) -> None:
        self._distributed = distributed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._distributed, name)

    def reduce(self, value: Any, *args: Any, **options: Any) -> Any:
        if isinstance(value, Late):
            return None
        return self._distributed.reduce(value, *args, **options)


def on_the_way(module: ModuleType, metrics: dict[str, Any], is_distributed: bool) -> Any:
    """The metrics of a step, on their way to the host; of all ranks for rank 0."""
    torch, dist = module.torch, module.dist
    there = torch.stack([value.detach().float() for value in metrics.values()])
    if is_distributed:
        dist.reduce(there, dst=0, op=dist.ReduceOp.AVG)
    here = torch.empty(there.shape, pin_memory=True)
    here.copy_(there, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    return {name: Late(here, place, arrived) for place, name in enumerate(metrics)}


class Late:
    """A metric that a step has not computed yet."""

    def __init__(self, values: Any, place: int, arrived: Any) -> None:
        self._values, self._place, self.arrived = values, place, arrived

    def item(self) -> Late:
        """Itself: the trainer asks for the number before it is there."""
        return self

    def number(self) -> float:
        """Waits for it."""
        self.arrived.synchronize()
        return float(self._values[self._place])


class InOrder:
    """A logger whose messages wait for their numbers, and for the messages before them."""

    def __init__(self, logger: Any) -> None:
        self._logger = logger
        self._waiting: deque[tuple[dict[str, Any], dict[str, Any]]] = deque()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._logger, name)

    def info(self, message: Any, **options: Any) -> None:
        self._waiting.append((message, options))
        while self._waiting and (
            len(self._waiting) > STEPS_LATE
            or all(late.arrived.query() for late in _late(self._waiting[0][0]))
        ):
            self._log()

    def flush(self) -> None:
        while self._waiting:
            self._log()

    def _log(self) -> None:
        message, options = self._waiting.popleft()
        self._logger.info(_numbers(message), **options)


def _late(message: Any) -> list[Late]:
    if isinstance(message, dict):
        return [late for value in message.values() for late in _late(value)]
    return [message] if isinstance(message, Late) else []


def _numbers(message: Any) -> Any:
    if isinstance(message, dict):
        return {name: _numbers(value) for name, value in message.items()}
    return message.number() if isinstance(message, Late) else message
