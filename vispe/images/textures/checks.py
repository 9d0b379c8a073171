"""Option types and helpers shared by the textures."""

from collections.abc import Sequence
from typing import Annotated

import numpy as np

from vispe.errors import OptionError
from vispe.utils.interval import Interval
from vispe.utils.options import PositiveFloat, PositiveInt

Seed = int | np.random.Generator
"""Source of randomness of a texture: an integer, or a numpy Generator, which is advanced."""

Size = PositiveInt | tuple[PositiveInt, PositiveInt]
"""Pixels (y, x), or one number for both."""

Fractions = Annotated[tuple[PositiveFloat, ...], Interval(least=2)]


def frozen(*arrays: np.ndarray) -> None:
    """Make arrays read-only."""
    for array in arrays:
        array.setflags(write=False)


def both(size: Size) -> tuple[int, int]:
    """Return (y, x); a single number is used for both."""
    return size if isinstance(size, tuple) else (size, size)


def cumulated(fractions: Sequence[float]) -> np.ndarray:
    """Return the cumulative fractions of two or more classes without the last one, (classes - 1,).

    Raises:
        OptionError: the fractions do not sum to 1.
    """
    if abs(sum(fractions) - 1.0) > 1e-6:
        raise OptionError(f"fractions must have two or more entries and sum to 1, got {tuple(fractions)}.")
    return np.cumsum(fractions)[:-1]


def smooth(t: np.ndarray) -> np.ndarray:
    """Return the smoothstep 3t² - 2t³: 0 for t <= 0, 1 for t >= 1, with continuous slope."""
    t = np.clip(t, 0.0, 1.0)
    return t * t * (3.0 - 2.0 * t)
