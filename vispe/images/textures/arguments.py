"""Checks of what a texture is asked."""

import math
from collections.abc import Sequence
from numbers import Integral, Real

import numpy as np

from vispe.errors import OptionError

Seed = int | np.random.Generator
"""What draws a texture: a whole number, or a numpy Generator, which is advanced."""


def frozen(*arrays: np.ndarray) -> None:
    """Make arrays read-only."""
    for array in arrays:
        array.setflags(write=False)


def number(value: float, name: str) -> float:
    """Return a finite number, checked."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise OptionError(f"{name} must be a finite number, got {value!r}.")
    return float(value)


def positive(value: float, name: str) -> float:
    """Return a positive number, checked."""
    if number(value, name) <= 0:
        raise OptionError(f"{name} must be positive, got {value!r}.")
    return float(value)


def not_negative(value: float, name: str) -> float:
    """Return a number that is 0 or more, checked."""
    if number(value, name) < 0:
        raise OptionError(f"{name} must be 0 or more, got {value!r}.")
    return float(value)


def pair(value: Sequence[float], name: str) -> tuple[float, float]:
    """Return two values, checked."""
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        raise OptionError(f"{name} must be two numbers, (y, x), got {value!r}.")
    return (value[0], value[1])


def whole_pair(value: int | tuple[int, int], name: str) -> tuple[int, int]:
    """Return two positive whole numbers; one stands for both."""
    both = (value, value) if isinstance(value, Integral) else pair(value, name)
    if any(isinstance(n, bool) or not isinstance(n, Integral) or n < 1 for n in both):
        raise OptionError(f"{name} must be whole pixels, at least 1, got {value!r}.")
    return (int(both[0]), int(both[1]))


def shares(fractions: Sequence[float]) -> np.ndarray:
    """Return the cumulated shares of two or more classes without the last one, (classes - 1,), checked."""
    parts = np.array([positive(f, "each of fractions") for f in fractions])
    if len(parts) < 2 or abs(parts.sum() - 1.0) > 1e-6:
        raise OptionError(
            f"fractions must be those of two or more classes and sum to 1, got {tuple(fractions)}."
        )
    return np.cumsum(parts)[:-1]


def smooth(t: np.ndarray) -> np.ndarray:
    """Return a step from 0 at t <= 0 to 1 at t >= 1 with a continuous slope."""
    t = np.clip(t, 0.0, 1.0)
    return t * t * (3.0 - 2.0 * t)
