"""Learning-rate schedules of training: constant or cosine decay, after a linear warm-up."""

import math
from typing import Literal

import torch

Schedule = Literal["constant", "cosine"]


def scheduled_lr(
    step: int, steps: int, *, lr: float, schedule: Schedule = "constant", warmup_steps: int = 0
) -> float:
    """Return the learning rate of a training step.

    Args:
        step: index of the step, from 0.
        steps: number of steps.
        lr: peak learning rate.
        schedule: constant, or half a cosine to 0 over the steps after the warm-up.
        warmup_steps: steps of linear warm-up from 0.

    Example:
        >>> [round(scheduled_lr(k, 5, lr=1.0, schedule="cosine", warmup_steps=1), 3) for k in range(5)]
        [0.5, 1.0, 0.854, 0.5, 0.146]
    """
    if step < warmup_steps:
        return lr * (step + 1) / (warmup_steps + 1)
    if schedule == "constant":
        return lr
    done = (step - warmup_steps) / max(1, steps - warmup_steps)
    return lr * (0.5 + 0.5 * math.cos(math.pi * done))


def cosine_factors(steps: int) -> list[float]:
    """Return the factors of the learning rate for all steps of a cosine decay, and 0 for the end.

    They are rounded to float32, unlike those of `scheduled_lr`.

    Example:
        >>> [round(factor, 6) for factor in cosine_factors(2)]
        [1.0, 0.5, 0.0]
    """
    return (0.5 + 0.5 * torch.cos(torch.pi * (torch.arange(steps + 1) / steps))).tolist()
