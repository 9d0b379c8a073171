"""Training step of all trainings: gradients, their sum over processes, clipping, optimizer and moving average."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from vispe.backbones.distributed import Processes

R = TypeVar("R")


class TrainingStep:
    """Update of the parameters of an optimizer by the gradients of a loss.

    Args:
        optimizer: the optimizer.
        processes: processes whose gradients are summed; None for a single process.
        clip_grad: maximum norm of all gradients; `math.inf` only measures it, None skips it.
        scaler: loss scaling, by which `backward` scales the loss; None disables it.
        schedule: schedule that advances after every step; None if the caller passes learning rates.

    Attributes:
        norm: norm of the last gradients before clipping; None without `clip_grad`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        processes: Processes | None = None,
        clip_grad: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
        schedule: torch.optim.lr_scheduler.LRScheduler | None = None,
    ) -> None:
        self.optimizer, self.clip_grad, self.schedule = optimizer, clip_grad, schedule
        self.processes = processes or Processes()
        self.scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
        self.norm: Tensor | None = None

    def __call__(self, backward: Callable[[], R], lr: float | Sequence[float] | None = None) -> R:
        """Run one training step.

        Args:
            backward: computes the loss and adds its gradients; called once.
            lr: learning rate, of all parameter groups or of each; None keeps that of the optimizer.

        Returns:
            The value of `backward`.
        """
        groups = self.optimizer.param_groups
        if lr is not None:
            for group, rate in zip(
                groups, lr if isinstance(lr, Sequence) else [lr] * len(groups), strict=True
            ):
                group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        result = backward()
        parameters = [p for group in groups for p in group["params"]]
        # sum the gradients of all processes, and unscale them before clipping
        self.processes.sum_([p.grad for p in parameters if p.grad is not None])
        self.scaler.unscale_(self.optimizer)
        if self.clip_grad is not None:
            self.norm = nn.utils.clip_grad_norm_(parameters, self.clip_grad)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.schedule is not None:
            self.schedule.step()
        return result


@torch.no_grad()
def update_average(average: Sequence[Tensor], weights: Sequence[Tensor], decay: float, step: int) -> None:
    """Update exponential moving averages of weights in place, after training step `step` (from 0)."""
    # faster decay in the first steps, so that the initial weights are forgotten
    torch._foreach_lerp_(list(average), list(weights), 1 - min(decay, (1 + step) / (10 + step)))


def autocast(amp: Literal["no", "bf16", "fp16"], device: torch.device) -> AbstractContextManager[Any]:
    """Return the autocast context of a precision, on the type of the device."""
    if amp == "no":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16 if amp == "bf16" else torch.float16)
