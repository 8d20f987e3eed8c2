"""speculators' trainer, which also waits for space and stops at a loss that is no number."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from speculators.train.trainer import Trainer

# Steps whose losses may be on their way from the GPU: to ask for one at once would keep it waiting.
LATE = 8


class StepLoss(NamedTuple):
    """The loss of a step, in the host's memory once the event `copied` is over."""

    step: int
    value: torch.Tensor
    copied: torch.cuda.Event | None

    @classmethod
    def of(cls, step: int, loss: torch.Tensor) -> StepLoss:
        if not loss.is_cuda:
            return cls(step, loss, None)
        here = torch.empty((), dtype=loss.dtype, pin_memory=True)
        here.copy_(loss, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        return cls(step, here, copied)

    def check(self) -> None:
        """Waits for it. Raises RuntimeError when it is not finite."""
        if self.copied is not None:
            self.copied.synchronize()
        if not math.isfinite(loss := self.value.item()):
            raise RuntimeError(f"the loss is {loss} in step {self.step}")


class GuardedTrainer(Trainer):  # type: ignore[misc]
    """Calls `wait_for(bytes)` before each checkpoint, and saves none after a broken loss.

    RuntimeError where the loss of a step is not finite: on a CPU at the next step, on a GPU some
    steps later, and in any case before a checkpoint.
    """

    def __init__(self, *args: Any, wait_for: Callable[[int], object], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._wait_for = wait_for
        self._losses: deque[StepLoss] = deque()
        self.model.register_forward_hook(self._forwarded)

    def save_checkpoint(self, epoch: int) -> None:
        """Save the epoch once there is space for all of it."""
        self._check_losses(but=0)
        self._wait_for(self.checkpoint_bytes)
        super().save_checkpoint(epoch)

    @property
    def checkpoint_bytes(self) -> int:
        """The size of a checkpoint: the weights in bfloat16, and of those that are trained also
        the weights in their own dtype and both moments of the optimizer.
        """
        weights = list(self.model.parameters())
        trained = sum(w.numel() * w.element_size() for w in weights if w.requires_grad)
        return int(2 * sum(w.numel() for w in weights) + 3 * trained)

    def _forwarded(self, model: Any, inputs: Any, output: tuple[Any, torch.Tensor, Any]) -> None:
        """The forward hook: (draft tokens, loss, metrics) are what the head gives out."""
        loss = output[1].detach()
        self._check_losses(but=LATE if loss.is_cuda else 0)
        if model.training:
            self._losses.append(StepLoss.of(self.global_step + 1, loss))

    def _check_losses(self, but: int) -> None:
        """Look at the losses of all steps but the last ones."""
        while len(self._losses) > but:
            self._losses.popleft().check()
