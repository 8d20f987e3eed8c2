"""speculators' trainer, which also waits for space and stops at a loss that is no number."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from speculators.train.trainer import Trainer


class GuardedTrainer(Trainer):  # type: ignore[misc]
    """Calls `wait_for(bytes)` before each checkpoint, and lets no step with a broken loss pass.

    The loss of a step is looked at before the next one and before a checkpoint, by when it is
    there: to ask for it at once would keep a GPU waiting. RuntimeError where it is not finite.
    """

    def __init__(self, *args: Any, wait_for: Callable[[int], object], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._wait_for = wait_for
        self._loss: torch.Tensor | None = None
        self.model.register_forward_hook(self._forwarded)

    def save_checkpoint(self, epoch: int) -> None:
        """Save the epoch once there is space for all of it."""
        self._check_loss()
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
        self._check_loss()
        if model.training:
            self._loss = output[1].detach()

    def _check_loss(self) -> None:
        if self._loss is not None and not math.isfinite(loss := self._loss.item()):
            raise RuntimeError(f"the loss is {loss} in step {self.global_step}")
        self._loss = None
