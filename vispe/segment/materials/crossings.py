"""Crossings of boundaries by test lines, block by block of a page."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise

import numpy as np

from vispe.errors import InputError, ShapeError
from vispe.segment.materials.directions import STEPS

BLOCKS = 4
"""Blocks along each side of a page, at most; they stand for the fields of view of ASTM E112."""

_SIDE = 16  # pixels along a side of a block, at least
_LEAST = 8  # pixels along a side of a page


@dataclass(frozen=True, eq=False)
class Crossings:
    """What was counted on B blocks of a page with K classes, along 16 directions.

    Attributes:
        pixels: (B, K) pixels of each class.
        steps: (B, 16) steps whose pixels all hold data.
        changes: (B, 16, K + 1) crossings on these steps: of any boundary, and of those of each class.
    """

    pixels: np.ndarray
    steps: np.ndarray
    changes: np.ndarray


def count_crossings(labels: np.ndarray, n_classes: int) -> Crossings:
    """Count crossings of boundaries along all test lines through centres of pixels.

    Between two pixels of a line it passes between pairs of pixels; of each pair the one counts with which the fewest
    boundaries are crossed. So a straight boundary is crossed once, however its pixels step. What is narrower than a
    step may be missed (3.6 px in the longest).

    Args:
        labels: (h, w) integers, 1..K; 0 = no data.
        n_classes: K.

    Raises:
        ShapeError: not one page.
        InputError: a page below 8 px along a side, or labels above K.

    >>> found = count_crossings(np.repeat([[1, 2]], 20, 0).repeat(10, 1), 2)
    >>> found.changes[:, 0, 0].sum(), found.steps[:, 0].sum()  # one boundary along each of 20 rows
    (np.int64(20), np.int64(380))
    """
    if labels.ndim != 2:
        raise ShapeError(f"crossings are counted on one page (h, w), got labels.shape={labels.shape}.")
    if min(labels.shape) < _LEAST:
        raise InputError(
            f"materials numbers need at least {_LEAST} px along each side, got {labels.shape[0]} x "
            f"{labels.shape[1]}; leave out --materials."
        )
    if int(labels.max()) > n_classes or int(labels.min()) < 0:
        raise InputError(f"labels go from {labels.min()} to {labels.max()}, but n_classes={n_classes}.")
    classes = range(1, n_classes + 1)
    pixels = np.stack([_blocks(labels == k, labels.shape, (0, 0)) for k in classes], -1)
    steps, changes = zip(*(_along(labels, step, n_classes) for step in STEPS), strict=True)
    return Crossings(pixels, np.stack(steps, 1), np.stack(changes, 1))


def _along(labels: np.ndarray, step: tuple[int, int], n_classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Count along one direction -> steps (B,), crossings (B, K + 1)."""
    passed = _passed(step)
    places = [place for side in passed for place in side]
    every = {place: _window(labels, step, place) for place in places}
    known = None if labels.all() else reduce(np.logical_and, [view > 0 for view in every.values()])
    size = every[0, 0].shape
    steps = _blocks(np.ones(size, bool) if known is None else known, labels.shape, step)
    crossings = []
    for k in range(n_classes + 1):
        # of any boundary: as labels are; of a class: inside or outside
        views = every if k == 0 else {place: view == k for place, view in every.items()}
        found = _fewest(views, passed)
        crossings.append(_blocks(found if known is None else found * known, labels.shape, step))
    return steps, np.stack(crossings, -1)


def _passed(step: tuple[int, int]) -> list[list[tuple[int, int]]]:
    """Return the pixels that a step passes: one where its line meets a centre, else the two beside it."""
    long, short = (1, 0) if abs(step[1]) >= abs(step[0]) else (0, 1)
    sign = 1 if step[long] > 0 else -1
    out = []
    for t in range(abs(step[long]) + 1):
        beside = {(t * step[short]) // abs(step[long]), -(-t * step[short] // abs(step[long]))}
        out.append([(s, sign * t) if long else (sign * t, s) for s in sorted(beside)])
    return out


def _window(array: np.ndarray, step: tuple[int, int], place: tuple[int, int]) -> np.ndarray:
    """View the pixels at `place` from the first one of every step that lies on the page."""
    cuts = []
    for side, whole, own in zip(array.shape, step, place, strict=True):
        start = max(0, -whole) + own
        cuts.append(slice(start, start + side - abs(whole)))
    return array[tuple(cuts)]


def _fewest(
    views: dict[tuple[int, int], np.ndarray], passed: Sequence[Sequence[tuple[int, int]]]
) -> np.ndarray:
    """Count the changes along each step, with the choice of pixels that has the fewest."""
    costs: list[np.ndarray | int] = [0]
    for before, after in pairwise(passed):
        costs = [
            reduce(
                np.minimum,
                [cost + (views[b] != views[a]).view(np.uint8) for cost, b in zip(costs, before, strict=True)],
            )
            for a in after
        ]
    return np.asarray(costs[0])


def _blocks(values: np.ndarray, page: tuple[int, ...], step: tuple[int, int]) -> np.ndarray:
    """Sum values (rows, columns), one for each step on the page, over the blocks that hold the steps' middles."""
    for axis, (side, whole) in enumerate(zip(page, step, strict=True)):
        count = min(max(side // _SIDE, 1), BLOCKS)
        middle = max(0, -whole) + whole / 2 + 0.5  # of the first step
        starts = np.maximum(np.ceil(np.arange(count) * side / count - middle), 0).astype(int)
        values = np.add.reduceat(values, starts, axis, dtype=np.int64)
    return values.ravel()
