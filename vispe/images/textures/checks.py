"""What several textures are asked."""

from collections.abc import Sequence
from typing import Annotated

import numpy as np

from vispe.errors import OptionError
from vispe.options import Limits, Positive, Whole

Seed = int | np.random.Generator
"""What draws a texture: a whole number, or a numpy Generator, which is advanced."""
Size = Whole | tuple[Whole, Whole]
"""Pixels (y, x), or one number for both."""
Fractions = Annotated[tuple[Positive, ...], Limits(least=2)]


def frozen(*arrays: np.ndarray) -> None:
    """Make arrays read-only."""
    for array in arrays:
        array.setflags(write=False)


def both(size: Size) -> tuple[int, int]:
    """Return (y, x); one number stands for both."""
    return size if isinstance(size, tuple) else (size, size)


def cumulated(fractions: Sequence[float]) -> np.ndarray:
    """Return the cumulated shares of two or more classes without the last one, (classes - 1,), checked."""
    if abs(sum(fractions) - 1.0) > 1e-6:
        raise OptionError(
            f"fractions must be those of two or more classes and sum to 1, got {tuple(fractions)}."
        )
    return np.cumsum(fractions)[:-1]


def smooth(t: np.ndarray) -> np.ndarray:
    """Return a step from 0 at t <= 0 to 1 at t >= 1 with a continuous slope."""
    t = np.clip(t, 0.0, 1.0)
    return t * t * (3.0 - 2.0 * t)
