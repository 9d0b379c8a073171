"""Sparse sample grid on a page, where features are compared with those of the training images.

The grid contains every `STEP`-th pixel along each axis, and `PATCH` x `PATCH` pixels form a patch. Grid and
patches start at the page origin, so that the grid points of a region are exactly those of the complete page
in it.
"""

from dataclasses import dataclass

import numpy as np

from vispe.segment.classify.out_of_distribution import FeatureDistribution, feature_sums
from vispe.segment.features.prepared_page import PreparedPage
from vispe.segment.features.threads import in_order
from vispe.segment.features.tiles import STEP, Region, common, grid_points

PATCH = 64
"""Side of a patch in pixels."""

SIDE = PATCH // STEP
"""Grid points along a side of a patch."""

PIECES = 16
"""Number of sampled pieces of training pages, at least one of each page."""

PAGES = 64
"""Upper bound of sampled training pages."""

_LEAST = 16  # minimal number of points of a patch
_HALVES = 2  # number of parts per axis of a page; parts are held out one at a time


@dataclass(frozen=True, eq=False)
class Sample:
    """Features of a training page at the grid points.

    Attributes:
        features: (n, f) float32.
        patch: (n,) int, index of the patch of each point, 0 to the number of patches - 1.
        part: (patches,) quarter of the page, 0 to 3, that contains each patch.
    """

    features: np.ndarray
    patch: np.ndarray
    part: np.ndarray


def sample(prepared: PreparedPage, valid: np.ndarray, most: int = PIECES) -> Sample | None:
    """Compute the features of a page at the grid points, piece by piece.

    Args:
        prepared: the page.
        valid: (h, w) bool, pixels with data; only indexed by regions.
        most: upper bound of sampled pieces, which are evenly spaced.

    Returns:
        None for a page without a patch with data.
    """
    height, width = valid.shape
    chosen = np.unique(np.linspace(0, len(prepared.pieces) - 1, most).round().astype(int))
    features, patches = [], []
    sampled = in_order(lambda index: prepared.sampled(int(chosen[index])), len(chosen), prepared.threads)
    for number, block in zip(chosen.tolist(), sampled, strict=True):
        piece = prepared.pieces[number]
        points = grid_points(piece)
        if not block.size:
            continue
        rows, columns = (np.arange(a, b) // SIDE for a, b in (points[:2], points[2:]))
        has_data = valid[piece.slices][np.ix_(*offsets(piece))]
        # pieces overlap: a patch covered by two of them counts once in each
        patch_index = (number * height + rows[:, None]) * width + columns
        features.append(block[has_data])
        patches.append(patch_index[has_data])
    if not features:
        return None
    patch_ids, patch, counts = np.unique(np.concatenate(patches), return_inverse=True, return_counts=True)
    # drop incomplete patches at the page border: means of few points have a larger variance
    complete = counts >= _LEAST
    if not complete.any():
        return None
    keep = complete[patch]
    row, column = np.divmod(patch_ids[complete] % (height * width), width)
    # the quarter of the page is that of the patch centre
    halves = [(2 * a + 1) * PATCH * _HALVES // (2 * n) for a, n in ((row, height), (column, width))]
    part = np.minimum(halves[0], _HALVES - 1) * _HALVES + np.minimum(halves[1], _HALVES - 1)
    return Sample(np.concatenate(features)[keep], (np.cumsum(complete) - 1)[patch][keep], part)


def offsets(region: Region) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows and columns of the grid points in a region, relative to its first pixel."""
    top, bottom, left, right = grid_points(region)
    rows, columns = (np.arange(a, b) * STEP + STEP // 2 for a, b in ((top, bottom), (left, right)))
    return rows - region.top, columns - region.left


@dataclass(frozen=True, eq=False)
class FeatureGrid:
    """Quantised principal components of the features of a region at its grid points.

    Attributes:
        domain: the reference for the components.
        region: region of the page.
        codes: (rows, columns, m) int16, result of `FeatureDistribution.codes`.
        best: (rows, columns) float32, blending weight of the piece that set each point; negative if unset.
    """

    domain: FeatureDistribution
    region: Region
    codes: np.ndarray
    best: np.ndarray

    @classmethod
    def empty(cls, region: Region, domain: FeatureDistribution) -> "FeatureGrid":
        """Return the grid of a region without data."""
        top, bottom, left, right = grid_points(region)
        shape = max(bottom - top, 0), max(right - left, 0)
        return cls(
            domain,
            region,
            np.zeros((*shape, len(domain.components)), np.int16),
            np.full(shape, -1, np.float32),
        )

    def add(self, piece: Region, codes: np.ndarray, weight: np.ndarray | None) -> None:
        """Merge a piece (rows, columns, m): a point is taken from the piece whose centre is nearest.

        Args:
            piece: region of the page; pieces arrive in page order.
            codes: codes of all its points.
            weight: (h, w) its blending weight; None if pieces do not overlap.
        """
        grid, piece_grid = (Region(*grid_points(each)) for each in (self.region, piece))
        inner, outer = common(piece_grid, grid)
        if min(inner.shape) <= 0:
            return
        rows, columns = offsets(piece)
        weights = np.ones(piece_grid.shape, np.float32) if weight is None else weight[np.ix_(rows, columns)]
        better = weights[inner.slices] > self.best[outer.slices]
        self.best[outer.slices][better] = weights[inner.slices][better]
        self.codes[outer.slices][better] = codes[inner.slices][better]

    def forget(self, lost: np.ndarray) -> None:
        """Remove points without data; `lost` is (h, w) bool of the region."""
        self.best[lost[np.ix_(*offsets(self.region))]] = -1

    def sums(self, part: Region | None = None) -> np.ndarray:
        """Return the `feature_sums` of all points, or of the points in a part relative to the corner of the region."""
        index = (slice(None), slice(None))
        if part is not None:
            shifted = Region(
                part.top + self.region.top,
                part.bottom + self.region.top,
                part.left + self.region.left,
                part.right + self.region.left,
            )
            index = common(Region(*grid_points(self.region)), Region(*grid_points(shifted)))[0].slices
        return feature_sums(self.codes[index][self.best[index] >= 0])

    def map(self) -> np.ndarray:
        """Return the distance of each patch of a complete page in units of its limit, (rows, columns); NaN: no data."""
        rows, columns = (-(-n // SIDE) for n in self.best.shape)
        tallies = [
            feature_sums(codes[weights >= 0])
            for row in range(rows)
            for column in range(columns)
            for index in [(slice(row * SIDE, (row + 1) * SIDE), slice(column * SIDE, (column + 1) * SIDE))]
            for codes, weights in [(self.codes[index], self.best[index])]
        ]
        return self.domain.patches(np.array(tallies)).reshape(rows, columns)
