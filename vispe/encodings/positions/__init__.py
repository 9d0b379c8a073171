"""Position samplers, one file each, and the training progress that curricula read."""

from __future__ import annotations

from torch import nn

from vispe.encodings.base import Encoding
from vispe.errors import OptionError


def set_progress(model: nn.Module, progress: float, *, seed: int | None = None) -> None:
    """Set the training progress of all encodings in a model; training loops call it before each step.

    Samplers with a curriculum widen their range with it, and encodings with `reveal` open their frequency bands.
    Without a call, encodings behave as at the end of training.

    Args:
        model: any module that contains encodings.
        progress: completed steps / all steps, from 0 to 1.
        seed: seed of the samplers' draws in the next forward pass. Use a different one for every step and process, so
            that a resumed run draws the same values as an uninterrupted one. By default, samplers use torch's global
            generator.

    Raises:
        OptionError: `progress` is not from 0 to 1.

    Example:
        >>> from vispe import create_encoding
        >>> encoding = create_encoding("shift(reach=32,curriculum=[0,18])+sincos2d", dim=16)
        >>> set_progress(encoding, 10 / 100, seed=10)
    """
    if not 0 <= progress <= 1:
        raise OptionError(
            f"progress must be a fraction from 0 to 1, got {progress}. Pass completed steps / all steps."
        )
    for module in model.modules():
        if isinstance(module, Encoding):
            module.on_progress(float(progress), seed)
