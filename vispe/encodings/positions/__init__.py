"""Samplers: one file each, named after it; and how far training has come, for those that change with it."""

from __future__ import annotations

from torch import nn

from vispe.encodings.base import Encoding
from vispe.errors import OptionError


def set_progress(model: nn.Module, progress: float, *, seed: int | None = None) -> None:
    """Say to all encodings of a model which share of the training is done; training loops call it before each step.

    Samplers with a curriculum widen their range with it, and bands that are revealed open. Until it is called they
    are as at the end of training.

    Args:
        model: any module that has encodings inside.
        progress: steps done / all steps, from 0 to 1.
        seed: of what samplers draw in the next forward pass: another one for every step and process, so that a run
            that goes on draws as one that was never interrupted. By default they draw from torch's global generator.

    Raises:
        OptionError: `progress` is not from 0 to 1.

    Example:
        >>> from vispe import create_encoding
        >>> encoding = create_encoding("shift(reach=32,curriculum=[0,18])+sincos2d", dim=16)
        >>> set_progress(encoding, 10 / 100, seed=10)
    """
    if not 0 <= progress <= 1:
        raise OptionError(f"progress is the share of the steps that are done, from 0 to 1, got {progress}.")
    for module in model.modules():
        if isinstance(module, Encoding):
            module.advance(float(progress), seed)
