"""Summary statistics over images: mean, median, worst value and bootstrap confidence interval.

The image is the unit of resampling, as pixels and poses of one image are not independent. With fewer than five images
no interval is computed; all values are part of the results.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from vispe.errors import InputError, OptionError, ShapeError, counted
from vispe.utils.report.table import json_value

DRAWS = 2000
MIN_IMAGES = 5
"""Number of images below which no interval is computed."""

Better = Literal["low", "high", "zero"]


@dataclass(frozen=True)
class Summary:
    """Summary of one value per image.

    Attributes:
        n: number of images with a value.
        missing: number of images without (NaN).
        mean: over images.
        median: over images.
        std: sample standard deviation over images; 0 for one image.
        worst: the value of the worst image.
        interval: 95 % percentile bootstrap interval (low, high) of the mean; None with fewer than 5 images.

    Example:
        >>> summarise([0.1, 0.2, 0.6, float("nan")])
        Summary(n=3, missing=1, mean=0.3, median=0.2, std=0.264575131106459, worst=0.6, interval=None)
    """

    n: int
    missing: int
    mean: float
    median: float
    std: float
    worst: float
    interval: tuple[float, float] | None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values; NaN becomes None."""
        return json_value(asdict(self))


def summarise(
    values: Sequence[float] | np.ndarray, better: Better = "low", *, draws: int = DRAWS, seed: int = 0
) -> Summary:
    """Return summary statistics of one value per image.

    Example:
        >>> summary = summarise([0.1, 0.2, 0.6, float("nan")])
        >>> round(summary.mean, 2), summary.worst, summary.n, summary.missing
        (0.3, 0.6, 3, 1)

    Args:
        values: (n,); NaN for images without a value.
        better: direction of good values, which determines the worst: 'low', 'high', or 'zero' (nearest to 0).
        draws: number of bootstrap resamples.
        seed: random seed of the bootstrap.

    Raises:
        ShapeError: `values` is not 1-dimensional.
        OptionError: `better` is unknown, or `draws` is below 1.
    """
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1:
        raise ShapeError(f"summarise needs one value per image, (n,), got shape {array.shape}.")
    if better not in ("low", "high", "zero") or draws < 1:
        raise OptionError(
            f"summarise needs better='low', 'high' or 'zero' and draws >= 1, got better={better!r} and "
            f"draws={draws}."
        )
    valid = array[~np.isnan(array)]
    n, missing = len(valid), len(array) - len(valid)
    if n == 0:
        nan = float("nan")
        return Summary(0, missing, nan, nan, nan, nan, None)
    worst = {"low": valid.max(), "high": valid.min(), "zero": valid[np.abs(valid).argmax()]}[better]
    return Summary(
        n,
        missing,
        float(valid.mean()),
        float(np.median(valid)),
        float(valid.std(ddof=1)) if n > 1 else 0.0,
        float(worst),
        bootstrap_interval(valid, draws=draws, seed=seed) if n >= MIN_IMAGES else None,
    )


def bootstrap_interval(
    values: np.ndarray, *, draws: int = DRAWS, seed: int = 0, level: float = 0.95
) -> tuple[float, float]:
    """Return the percentile bootstrap interval (low, high) of the mean of `values` (n,).

    Raises:
        InputError: there are no values, or `level` is not in (0, 1).

    Example:
        >>> low, high = bootstrap_interval(np.arange(10.0))
        >>> low < 4.5 < high
        True
    """
    if len(values) == 0 or not 0 < level < 1:
        raise InputError(
            f"bootstrap_interval needs at least one value and 0 < level < 1, got {counted(len(values), 'value')} and "
            f"level={level}."
        )
    rng, n = np.random.default_rng(seed), len(values)
    # in batches of at most a million indices, to limit memory
    batch = max(1, 1_000_000 // n)
    means = [
        values[rng.integers(0, n, (min(batch, draws - start), n))].mean(1) for start in range(0, draws, batch)
    ]
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
    """Return the summary of `first - second` on the same images, to compare two models.

    Pairs of values are resampled together, so the difficulty of an image cancels. The difference is significant if the
    interval excludes 0.

    Example:
        >>> paired_difference([0.75, 0.5], [0.5, 0.5]).mean
        0.125

    Args:
        first: (n,) values of one model.
        second: (n,) values of the other, for the same images in the same order.
        draws: number of bootstrap resamples.
        seed: random seed of the bootstrap.

    Raises:
        ShapeError: the numbers of images differ.
    """
    a, b = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if a.shape != b.shape or a.ndim != 1:
        raise ShapeError(
            f"paired_difference needs values (n,) of the same images, got shapes {a.shape} and {b.shape}."
        )
    return summarise(a - b, "zero", draws=draws, seed=seed)
