"""A sparse lattice of pixels on a page, where features are compared with those of training.

Every `STEP`-th pixel along each axis belongs to it, and `PATCH` x `PATCH` pixels make a patch. Both are fixed on the
page, so that any region of it has the points that the whole page has there.
"""

from dataclasses import dataclass

import numpy as np

from vispe.segment.classify.out_of_distribution import Domain, tally
from vispe.segment.features.pixel_features import PreparedPage
from vispe.segment.features.threads import in_order
from vispe.segment.features.tiles import STEP, Region, common, lattice

PATCH = 64
"""Side of a patch in pixels."""

SIDE = PATCH // STEP
"""Points along a side of a patch."""

PIECES = 16
"""Pieces of training pages that are looked at, at least one of each page."""

PAGES = 64
"""Training pages that are looked at."""

_LEAST = 16  # points of a patch that counts
_HALVES = 2  # parts along each axis of a page, of which one is held out at a time


@dataclass(frozen=True, eq=False)
class Sample:
    """Features of a training page on the lattice.

    Attributes:
        features: (n, f) float32.
        patch: (n,) int, the patch that each point belongs to, 0 to the number of patches - 1.
        part: the quarter of the page, 0 to 3, that each patch lies in.
    """

    features: np.ndarray
    patch: np.ndarray
    part: np.ndarray


def sample(prepared: PreparedPage, valid: np.ndarray, most: int = PIECES) -> Sample | None:
    """Compute the features of a page on the lattice, piece by piece.

    Args:
        prepared: the page.
        valid: (h, w) bool, pixels with data; only indexed by regions.
        most: pieces; of more, so many are taken at even distances.

    Returns:
        None for a page without a patch that has data.
    """
    height, width = valid.shape
    chosen = np.unique(np.linspace(0, len(prepared.pieces) - 1, most).round().astype(int))
    features, patches = [], []
    sampled = in_order(lambda index: prepared.sampled(int(chosen[index])), len(chosen), prepared.threads)
    for number, found in zip(chosen.tolist(), sampled, strict=True):
        piece = prepared.pieces[number]
        points = lattice(piece)
        if not found.size:
            continue
        rows, columns = (np.arange(a, b) // SIDE for a, b in (points[:2], points[2:]))
        known = valid[piece.slices][np.ix_(*offsets(piece))]
        # pieces overlap, and a patch that two of them hold counts in each
        own = (number * height + rows[:, None]) * width + columns
        features.append(found[known])
        patches.append(own[known])
    if not features:
        return None
    names, patch, counts = np.unique(np.concatenate(patches), return_inverse=True, return_counts=True)
    # the rim of a page leaves patches of a few points, whose means vary more than those of others
    whole = counts >= _LEAST
    if not whole.any():
        return None
    keep = whole[patch]
    row, column = np.divmod(names[whole] % (height * width), width)
    # by the middle of the patch
    across = [(2 * a + 1) * PATCH * _HALVES // (2 * n) for a, n in ((row, height), (column, width))]
    part = np.minimum(across[0], _HALVES - 1) * _HALVES + np.minimum(across[1], _HALVES - 1)
    return Sample(np.concatenate(features)[keep], (np.cumsum(whole) - 1)[patch][keep], part)


def offsets(region: Region) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows and columns of the lattice in a region, counted from its first pixel."""
    top, bottom, left, right = lattice(region)
    rows, columns = (np.arange(a, b) * STEP + STEP // 2 for a, b in ((top, bottom), (left, right)))
    return rows - region.top, columns - region.left


@dataclass(frozen=True, eq=False)
class Seen:
    """What the features of a region look like on its lattice.

    Attributes:
        domain: what they are compared with.
        region: of the page.
        codes: (rows, columns, m) int16, of `Domain.codes`.
        best: (rows, columns) float32, how far inside its piece each point lies; negative where nothing is known.
    """

    domain: Domain
    region: Region
    codes: np.ndarray
    best: np.ndarray

    @classmethod
    def empty(cls, region: Region, domain: Domain) -> "Seen":
        """Return the lattice of a region before anything was seen."""
        top, bottom, left, right = lattice(region)
        shape = max(bottom - top, 0), max(right - left, 0)
        return cls(
            domain,
            region,
            np.zeros((*shape, len(domain.components)), np.int16),
            np.full(shape, -1, np.float32),
        )

    def add(self, piece: Region, codes: np.ndarray, weight: np.ndarray | None) -> None:
        """Take over a piece (rows, columns, m) where it has a point nearer to its middle than pieces before.

        Args:
            piece: of the page; pieces come in their order on the page.
            codes: of all its points.
            weight: (h, w) its blending weight; None where pieces do not overlap.
        """
        here, own = (Region(*lattice(each)) for each in (self.region, piece))
        inner, outer = common(own, here)
        if min(inner.shape) <= 0:
            return
        rows, columns = offsets(piece)
        near = np.ones(own.shape, np.float32) if weight is None else weight[np.ix_(rows, columns)]
        better = near[inner.slices] > self.best[outer.slices]
        self.best[outer.slices][better] = near[inner.slices][better]
        self.codes[outer.slices][better] = codes[inner.slices][better]

    def forget(self, lost: np.ndarray) -> None:
        """Leave out points without data, lost (h, w) bool of the region."""
        self.best[lost[np.ix_(*offsets(self.region))]] = -1

    def sums(self, part: Region | None = None) -> np.ndarray:
        """Sum up all points, or those in a part that is counted from the corner of the region, as `tally`."""
        where = (slice(None), slice(None))
        if part is not None:
            moved = Region(
                part.top + self.region.top,
                part.bottom + self.region.top,
                part.left + self.region.left,
                part.right + self.region.left,
            )
            where = common(Region(*lattice(self.region)), Region(*lattice(moved)))[0].slices
        return tally(self.codes[where][self.best[where] >= 0])

    def map(self) -> np.ndarray:
        """Return the distance of each patch of a whole page in units of its limit, (rows, columns); NaN: no data."""
        rows, columns = (-(-n // SIDE) for n in self.best.shape)
        found = [
            tally(codes[known >= 0])
            for row in range(rows)
            for column in range(columns)
            for where in [(slice(row * SIDE, (row + 1) * SIDE), slice(column * SIDE, (column + 1) * SIDE))]
            for codes, known in [(self.codes[where], self.best[where])]
        ]
        return self.domain.patches(np.array(found)).reshape(rows, columns)
