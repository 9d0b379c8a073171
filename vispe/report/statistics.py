"""Summaries over images: mean, median, worst and a bootstrap interval.

The image is the unit: pixels and poses of one image are not independent, so only images are drawn again. With fewer
than five images there is no interval; every value is in the results anyway.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from vispe.errors import InputError, OptionError, ShapeError
from vispe.report.table import json_value

DRAWS = 2000
FEWEST = 5
"""Images below which no interval is given."""

Better = Literal["low", "high", "zero"]


@dataclass(frozen=True)
class Summary:
    """One number over images.

    Attributes:
        n: images that have the number.
        missing: images that do not (their value is NaN).
        mean: over images.
        median: over images.
        std: sample standard deviation over images; 0 for one image.
        worst: the value of the worst image.
        interval: 95 % percentile bootstrap interval (low, high) of the mean; None with fewer than 5 images.
    """

    n: int
    missing: int
    mean: float
    median: float
    std: float
    worst: float
    interval: tuple[float, float] | None

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values; NaN becomes None."""
        return json_value(asdict(self))


def summarise(
    values: Sequence[float] | np.ndarray, better: Better = "low", *, draws: int = DRAWS, seed: int = 0
) -> Summary:
    """Summarise one value for each image.

    >>> found = summarise([0.1, 0.2, 0.6, float("nan")])
    >>> round(found.mean, 2), found.worst, found.n, found.missing
    (0.3, 0.6, 3, 1)

    Args:
        values: (n,); NaN where an image has no such number.
        better: what a good value is, which decides the worst one: 'low', 'high', or 'zero' (nearest to 0).
        draws: bootstrap resamples.
        seed: of the bootstrap.

    Raises:
        ShapeError: not one value for each image.
        OptionError: an unknown `better` or no draws.
    """
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1:
        raise ShapeError(f"A summary needs one value for each image, (n,), got the shape {array.shape}.")
    if better not in ("low", "high", "zero") or draws < 1:
        raise OptionError(
            f"A summary needs better='low', 'high' or 'zero' and draws from 1 up, got better={better!r} and "
            f"draws={draws}."
        )
    known = array[~np.isnan(array)]
    n, missing = len(known), len(array) - len(known)
    if n == 0:
        nan = float("nan")
        return Summary(0, missing, nan, nan, nan, nan, None)
    worst = {"low": known.max(), "high": known.min(), "zero": known[np.abs(known).argmax()]}[better]
    return Summary(
        n,
        missing,
        float(known.mean()),
        float(np.median(known)),
        float(known.std(ddof=1)) if n > 1 else 0.0,
        float(worst),
        bootstrap_interval(known, draws=draws, seed=seed) if n >= FEWEST else None,
    )


def bootstrap_interval(
    values: np.ndarray, *, draws: int = DRAWS, seed: int = 0, level: float = 0.95
) -> tuple[float, float]:
    """Return the percentile bootstrap interval (low, high) of the mean of `values` (n,), drawn with replacement.

    >>> low, high = bootstrap_interval(np.arange(10.0))
    >>> low < 4.5 < high
    True
    """
    if len(values) == 0 or not 0 < level < 1:
        raise InputError(
            f"A bootstrap needs values and a level between 0 and 1, got {len(values)} values and level={level}."
        )
    rng, n = np.random.default_rng(seed), len(values)
    # at most a million indices are held at once
    rows = max(1, 1_000_000 // n)
    means = [values[rng.integers(0, n, (min(rows, draws - at), n))].mean(1) for at in range(0, draws, rows)]
    tail = 50 * (1 - level)
    low, high = np.percentile(np.concatenate(means), [tail, 100 - tail])
    return float(low), float(high)


def paired_difference(
    first: Sequence[float] | np.ndarray,
    second: Sequence[float] | np.ndarray,
    *,
    draws: int = DRAWS,
    seed: int = 0,
) -> Summary:
    """Summarise `first - second` on the same images: the comparison of two models.

    Images are drawn in pairs, so what makes an image hard for both cancels; an interval without 0 is a difference.

    >>> paired_difference([0.75, 0.5], [0.5, 0.5]).mean
    0.125

    Args:
        first: (n,) values of one model.
        second: (n,) values of the other, of the same images in the same order.
        draws: bootstrap resamples.
        seed: of the bootstrap.

    Raises:
        ShapeError: the numbers of images differ.
    """
    a, b = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if a.shape != b.shape or a.ndim != 1:
        raise ShapeError(
            f"A paired difference needs the same images twice, got the shapes {a.shape} and {b.shape}."
        )
    return summarise(a - b, "zero", draws=draws, seed=seed)
