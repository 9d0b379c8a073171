"""Targets of the positional probe (ramps over the grid) and its sampling masks.

Source: the probe of dino-saw (tldr-group, arXiv 2603.16840).
"""

from typing import Annotated

import numpy as np

from vispe.errors import OptionError, ShapeError, did_you_mean
from vispe.utils.interval import Interval
from vispe.utils.options import PositiveInt, checked

TARGETS = ("lr+ud", "lr", "ud", "diag", "radial", "raster", "random")


def ramp(target: str, shape: tuple[int, int], generator: np.random.Generator | None = None) -> np.ndarray:
    """Return the values of a positional target on a grid, (h, w, n) float64; n is 2 for `lr+ud`, else 1.

    Args:
        target: `lr` and `ud` increase from 0 to 1 along columns and rows, `lr+ud` stacks them; `diag` is the mean
            of both, each over the longer side; `radial` decreases from 1 at patch (h//2, w//2) to 0 at the
            farthest patch; `raster` is (row·w + col)/(h·w); `random` is uniform noise, the sanity check.
        shape: grid (h, w) in patches.
        generator: random generator for `random`; other targets ignore it.

    Raises:
        OptionError: unknown target, or `random` without a generator.
        ShapeError: a grid without patches.

    >>> ramp("lr", (2, 3))[..., 0].tolist()
    [[0.0, 0.5, 1.0], [0.0, 0.5, 1.0]]
    """
    check_target(target)
    h, w = _check_shape(shape)
    rows, cols = np.mgrid[:h, :w]
    if target == "lr+ud":
        return np.concatenate([ramp("lr", shape), ramp("ud", shape)], axis=2)
    if target == "lr":
        values = np.linspace(0, 1, w)[cols]
    elif target == "ud":
        values = np.linspace(0, 1, h)[rows]
    elif target == "diag":
        side = np.linspace(0, 1, max(h, w))
        values = (side[rows] + side[cols]) / 2
    elif target == "radial":
        radius = np.hypot(rows - h // 2, cols - w // 2)
        values = 1 - radius / max(radius.max(), 1)
    elif target == "raster":
        values = (rows * w + cols) / (h * w)
    else:
        values = _need_generator(generator, "the target 'random'").random((h, w))
    return values[..., None]


@checked
def sample_region(
    target: str, shape: tuple[int, int], cutoff: Annotated[float, Interval(above=0, most=1)] = 1.0
) -> tuple[int, int, int, int]:
    """Return the half-open box (y0, y1, x0, x1) of the training patches.

    Args:
        target: `radial` uses a centred box, all other targets the top-left one.
        shape: grid (h, w) in patches.
        cutoff: fraction of each side, in (0, 1].

    Raises:
        OptionError: an unknown target, or a cutoff out of range.
    """
    check_target(target)
    h, w = _check_shape(shape)
    rows, cols = int(h * cutoff), int(w * cutoff)
    if target != "radial":
        return 0, rows, 0, cols
    return -((rows - h) // 2), (h + rows) // 2, -((cols - w) // 2), (w + cols) // 2


@checked
def n_random_samples(region: tuple[int, int, int, int], step: PositiveInt) -> int:
    """Return the number of patches of a random mask in `region`: its area divided by step², rounded down."""
    y0, y1, x0, x1 = region
    return (y1 - y0) * (x1 - x0) // step**2


@checked
def sample_mask(
    target: str,
    shape: tuple[int, int],
    *,
    step: PositiveInt = 6,
    cutoff: float = 1.0,
    random: bool = True,
    generator: np.random.Generator | None = None,
) -> np.ndarray:
    """Return the mask (h, w) bool of the training patches.

    Args:
        target: `radial` samples a centred box, all other targets the top-left one.
        shape: grid (h, w) in patches.
        step: distance of sampled rows and columns; with `random`, the same number of patches at random.
        cutoff: fraction of each side that is sampled, in (0, 1].
        random: draw area/step² patches of the region without replacement, instead of a regular grid.
        generator: required for `random`.

    >>> sample_mask("lr", (4, 4), step=2, random=False).sum()
    np.int64(4)
    """
    y0, y1, x0, x1 = region = sample_region(target, shape, cutoff)
    mask = np.zeros(shape, dtype=bool)
    box = mask[y0:y1, x0:x1]
    if random:
        draw = _need_generator(generator, "a random mask")
        indices = draw.choice(box.size, n_random_samples(region, step), replace=False)
        rows, cols = np.unravel_index(indices, box.shape)
        box[rows, cols] = True
    else:
        box[::step, ::step] = True
    return mask


def check_target(target: str) -> None:
    """Raise `OptionError` for an unknown target."""
    if target not in TARGETS:
        raise OptionError(
            f"ramp: unknown target, got {target!r}.{did_you_mean(target, TARGETS)} Use one of {', '.join(TARGETS)}."
        )


def _check_shape(shape: tuple[int, int]) -> tuple[int, int]:
    if len(shape) != 2 or min(shape) < 1:
        raise ShapeError(
            f"ramp: shape must be (h, w) with at least 1x1 patches, got {tuple(shape)}. Use two axes."
        )
    return int(shape[0]), int(shape[1])


def _need_generator(generator: np.random.Generator | None, purpose: str) -> np.random.Generator:
    if generator is None:
        raise OptionError(
            f"{purpose} needs a generator, got None. Pass generator=numpy.random.default_rng(seed)."
        )
    return generator
