"""Crossings of boundaries with test lines, per block of a page."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise

import numpy as np

from vispe.errors import InputError, ShapeError
from vispe.segment.materials.directions import STEPS
from vispe.utils.options import PositiveFloat, checked

BLOCKS = 4
"""Upper bound of blocks along each side of a page; they correspond to the fields of view of ASTM E112."""

_SIDE = 16  # minimal side of a block in pixels
_LEAST = 8  # minimal side of a page in pixels


@dataclass(frozen=True, eq=False)
class Crossings:
    """Counts on B blocks of a page with K classes, along 16 directions.

    Attributes:
        pixels: (B, K) pixels of each class.
        steps: (B, 16) steps whose pixels all have data.
        changes: (B, 16, K + 1) crossings on these steps: of any boundary, and of those of each class.
    """

    pixels: np.ndarray
    steps: np.ndarray
    changes: np.ndarray


def count_crossings(labels: np.ndarray, n_classes: int) -> Crossings:
    """Count crossings of boundaries along all test lines through pixel centres.

    Between two pixel centres on a line, the line passes between pairs of pixels. Of each pair, the pixel that
    gives the fewest crossings is used, so that a straight boundary is crossed only once, for any staircase of
    its pixels. Structures narrower than a step may be missed (3.6 px for the longest).

    Args:
        labels: (h, w) integers, 1..K; 0 = no data.
        n_classes: K.

    Raises:
        ShapeError: not one page.
        InputError: a page below 8 px along a side, or labels above K.

    Example:
        >>> counts = count_crossings(np.repeat([[1, 2]], 20, 0).repeat(10, 1), 2)
        >>> counts.changes[:, 0, 0].sum(), counts.steps[:, 0].sum()  # one boundary along each of 20 rows
        (np.int64(20), np.int64(380))
    """
    if labels.ndim != 2:
        raise ShapeError(f"labels must be one page (h, w), got labels.shape={labels.shape}.")
    if min(labels.shape) < _LEAST:
        raise InputError(
            f"materials needs at least {_LEAST} px along each side, got {labels.shape[0]} x "
            f"{labels.shape[1]}. Omit materials."
        )
    if int(labels.max()) > n_classes or int(labels.min()) < 0:
        raise InputError(
            f"labels must be in 0 to n_classes={n_classes}, got {labels.min()} to {labels.max()}."
        )
    classes = range(1, n_classes + 1)
    pixels = np.stack([_blocks(labels == k, labels.shape, (0, 0)) for k in classes], -1)
    # per direction: number of steps with data, and crossings per boundary
    steps, changes = zip(*(_along(labels, step, n_classes) for step in STEPS), strict=True)
    return Crossings(pixels, np.stack(steps, 1), np.stack(changes, 1))


def _along(labels: np.ndarray, step: tuple[int, int], n_classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of steps (B,) and of crossings (B, K + 1) along one direction."""
    path = _passed(step)
    offsets = [offset for side in path for offset in side]
    views_by_offset = {offset: _window(labels, step, offset) for offset in offsets}
    has_data = (
        None if labels.all() else reduce(np.logical_and, [view > 0 for view in views_by_offset.values()])
    )
    size = views_by_offset[0, 0].shape
    steps = _blocks(np.ones(size, bool) if has_data is None else has_data, labels.shape, step)
    crossings = []
    for k in range(n_classes + 1):
        # k = 0: crossings of any boundary; else of the boundary of class k
        views = views_by_offset if k == 0 else {offset: view == k for offset, view in views_by_offset.items()}
        fewest = _fewest(views, path)
        crossings.append(_blocks(fewest if has_data is None else fewest * has_data, labels.shape, step))
    return steps, np.stack(crossings, -1)


def _passed(step: tuple[int, int]) -> list[list[tuple[int, int]]]:
    """Return the pixels along a step: one pixel if the line passes its centre, otherwise the two nearest pixels."""
    # walk along the longer component of the step, one pixel at a time
    long, short = (1, 0) if abs(step[1]) >= abs(step[0]) else (0, 1)
    sign = 1 if step[long] > 0 else -1
    out = []
    for t in range(abs(step[long]) + 1):
        candidates = {(t * step[short]) // abs(step[long]), -(-t * step[short] // abs(step[long]))}
        out.append([(s, sign * t) if long else (sign * t, s) for s in sorted(candidates)])
    return out


def _window(array: np.ndarray, step: tuple[int, int], offset: tuple[int, int]) -> np.ndarray:
    """Return a view of the pixels at offset `offset` from the start of every step inside the page."""
    cuts = []
    for side, extent, shift in zip(array.shape, step, offset, strict=True):
        start = max(0, -extent) + shift
        cuts.append(slice(start, start + side - abs(extent)))
    return array[tuple(cuts)]


def _fewest(
    views: dict[tuple[int, int], np.ndarray], passed: Sequence[Sequence[tuple[int, int]]]
) -> np.ndarray:
    """Count the changes along each step, minimised over the choice of pixels by dynamic programming."""
    costs: list[np.ndarray | int] = [0]
    for before, after in pairwise(passed):
        # dynamic programming over the alternatives: fewest changes up to each pixel
        costs = [
            reduce(
                np.minimum,
                [cost + (views[b] != views[a]).view(np.uint8) for cost, b in zip(costs, before, strict=True)],
            )
            for a in after
        ]
    return np.asarray(costs[0])


def _blocks(values: np.ndarray, page: tuple[int, ...], step: tuple[int, int]) -> np.ndarray:
    """Sum values (rows, columns), one per step on the page, over the blocks that contain the midpoints of the steps."""
    for axis, (side, extent) in enumerate(zip(page, step, strict=True)):
        count = min(max(side // _SIDE, 1), BLOCKS)
        middle = max(0, -extent) + extent / 2 + 0.5  # of the first step
        starts = np.maximum(np.ceil(np.arange(count) * side / count - middle), 0).astype(int)
        values = np.add.reduceat(values, starts, axis, dtype=np.int64)
    return values.ravel()


@checked
def grain_size_number(mean_intercept_mm: PositiveFloat) -> float:
    """Return the ASTM grain size number G of a mean lineal intercept.

    G = -6.643856 log10(l) - 3.288, l in millimetres on the sample (magnification 1)   ASTM E112-13, table 6
    The numbers of the standard's table 4 follow: 0.320 mm is G 0, 56.6 um is G 5, 10.0 um is G 10.

    Args:
        mean_intercept_mm: length in mm on the sample; pixels without a size have no G.

    Raises:
        OptionError: a length that is not positive.

    Example:
        >>> round(grain_size_number(0.0566), 1)
        5.0
    """
    return -6.643856 * math.log10(mean_intercept_mm) - 3.288
