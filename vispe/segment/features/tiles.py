"""Tiling of a page into rectangles, and blending of overlapping tiles."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from vispe.errors import ShapeError

OVERLAP = 0.25
"""Minimal overlap of neighbouring tiles, as a fraction of their side."""


@dataclass(frozen=True)
class Region:
    """A rectangle of pixels: rows `top` to `bottom`, columns `left` to `right` (exclusive)."""

    top: int
    bottom: int
    left: int
    right: int

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return self.bottom - self.top, self.right - self.left

    @property
    def slices(self) -> tuple[slice, slice]:
        """Index of the region in an array that starts with the two image axes."""
        return slice(self.top, self.bottom), slice(self.left, self.right)


STEP = 8
"""Spacing in pixels of the sample grid, where features are compared with those of the training images."""


def grid_points(region: Region) -> tuple[int, int, int, int]:
    """Return the grid points (first row, stop, first column, stop) in a region; point i is pixel 8 i + 4."""
    bounds = (region.top, region.bottom, region.left, region.right)
    top, bottom, left, right = ((bound + STEP // 2 - 1) // STEP for bound in bounds)
    return top, bottom, left, right


def blocks(height: int, width: int, side: int) -> list[Region]:
    """Cut a page into non-overlapping blocks of at most `side` x `side` pixels, row by row."""
    return [
        Region(top, min(top + side, height), left, min(left + side, width))
        for top in range(0, height, side)
        for left in range(0, width, side)
    ]


def tiles(
    height: int, width: int, tile: tuple[int, int], step: int, overlap: float = OVERLAP
) -> list[Region]:
    """Cover a page with overlapping tiles of one size.

    Neighbouring tiles overlap by at least `overlap` of their side. All origins are multiples of `step`, and
    the last tile is moved inward instead of being cut.

    Args:
        height: height of the page in pixels, a multiple of `step`.
        width: width of the page in pixels, a multiple of `step`.
        tile: height and width of a tile, multiples of `step`, not larger than the page.
        step: patch size of the model in pixels.
        overlap: fraction of a tile, below 1.

    Raises:
        ShapeError: sizes that are not multiples of `step`, or a tile larger than the page.
    """
    for name, length, side in (("height", height, tile[0]), ("width", width, tile[1])):
        if length % step or side % step or not 0 < side <= length:
            raise ShapeError(
                f"tiles: {name} and tile must be multiples of step={step}, and the tile must not exceed the "
                f"page, got {name}={length}, tile={side}."
            )
    return [
        Region(top, top + tile[0], left, left + tile[1])
        for top in _starts(height, tile[0], step, overlap)
        for left in _starts(width, tile[1], step, overlap)
    ]


def _starts(length: int, side: int, step: int, overlap: float) -> list[int]:
    """Return the origins along one axis, spaced evenly on multiples of `step`."""
    # the largest multiple of the patch with the required overlap
    stride = max(int(side * (1 - overlap)) // step, 1) * step
    return [*range(0, length - side, stride), length - side]


def even_tiles(height: int, width: int, most: int, step: int, overlap: int) -> list[Region]:
    """Cover a page with the fewest tiles of equal size, as small as possible.

    Origins are symmetric about the centre of an axis, so that a rotated page is cut in the same way; only the middle
    one of an odd number of tiles may be off by half a step.

    Args:
        height: height of the page in pixels, a multiple of `step`.
        width: width of the page in pixels, a multiple of `step`.
        most: upper bound of the side of a tile in pixels, a multiple of `step`.
        step: patch size of the model in pixels.
        overlap: minimal overlap of neighbouring tiles in pixels, a multiple of `step` below `most`.
    """
    (tall, tops), (wide, lefts) = (_even(length, most, step, overlap) for length in (height, width))
    return [Region(top, top + tall, left, left + wide) for top in tops for left in lefts]


def _even(length: int, most: int, step: int, overlap: int) -> tuple[int, list[int]]:
    """Return the side of the tiles along an axis, and their origins."""
    if length <= most:
        return length, [0]
    # smallest number of tiles of at most `most` pixels with this overlap
    count = -(-(length - overlap) // (most - overlap))
    while True:
        least = -(-(length + (count - 1) * overlap) // (count * step)) * step
        for side in range(least, most + 1, step):
            slack = length - side
            first = [round(i * slack / (count - 1) / step) * step for i in range((count + 1) // 2)]
            # mirror the first half of the origins about the centre
            starts = first + [slack - start for start in first[: count // 2][::-1]]
            if max(b - a for a, b in pairwise(starts)) <= side - overlap:
                return side, starts
        count += 1


def padding(height: int, width: int, step: int, least: tuple[int, int] = (1, 1)) -> tuple[int, int, int, int]:
    """Return the padding (top, bottom, left, right) that makes both sides multiples of `step`.

    Each side gets half of the padding; if it is odd, the extra pixel is at the bottom or right. Sides shorter
    than `least` are extended to `least`.
    """
    out: list[int] = []
    for length, floor in ((height, least[0]), (width, least[1])):
        # round up to a multiple of the patch
        extra = -(-max(length, floor) // step) * step - length
        out += [extra // 2, extra - extra // 2]
    return out[0], out[1], out[2], out[3]


class Tiling:
    """Tiles of a padded page, and their location on the page.

    Args:
        regions: the tiles, in coordinates of the padded page.
        offset: padding at (top, left), in pixels.
        frame: height and width of the page without padding.
        notes: messages for the user.
    """

    def __init__(
        self,
        regions: list[Region],
        offset: tuple[int, int],
        frame: tuple[int, int],
        notes: tuple[str, ...] = (),
    ) -> None:
        self.regions, self.offset, self.frame, self.notes = regions, offset, frame, notes

    def inside(self, number: int) -> Region:
        """Return the part of a tile inside the page, in page coordinates."""
        tile, (dy, dx), (height, width) = self.regions[number], self.offset, self.frame
        top, bottom = max(tile.top - dy, 0), min(tile.bottom - dy, height)
        return Region(top, bottom, max(tile.left - dx, 0), min(tile.right - dx, width))

    def crop(self, number: int) -> tuple[slice, slice]:
        """Return the index of `inside(number)` within the tile."""
        tile, part, (dy, dx) = self.regions[number], self.inside(number), self.offset
        top, left = part.top + dy - tile.top, part.left + dx - tile.left
        return slice(top, top + part.shape[0]), slice(left, left + part.shape[1])


def common(piece: Region, frame: Region) -> tuple[Region, Region]:
    """Return the intersection of two rectangles, in the coordinates of the first and of the second."""
    top, bottom = max(piece.top, frame.top), min(piece.bottom, frame.bottom)
    left, right = max(piece.left, frame.left), min(piece.right, frame.right)
    return (
        Region(top - piece.top, bottom - piece.top, left - piece.left, right - piece.left),
        Region(top - frame.top, bottom - frame.top, left - frame.left, right - frame.left),
    )


def padded_page(
    page: np.ndarray, step: int, least: tuple[int, int] = (1, 1)
) -> tuple[np.ndarray, tuple[int, int, int, int], tuple[str, ...]]:
    """Pad a page (h, w, c) by reflection to a multiple of the patch size.

    Args:
        page: pixels.
        step: side of a patch in pixels.
        least: minimal height and width.

    Returns:
        The padded page, the padding at its (top, bottom, left, right), and notes.
    """
    height, width = page.shape[:2]
    pads = padding(height, width, step, least)
    framed = np.pad(page, (pads[:2], pads[2:], (0, 0)), mode="symmetric")
    if min(height, width) >= step:
        return framed, pads, ()
    note = f"the image is smaller than one patch of {step} px ({height} x {width}): padded by reflection."
    return framed, pads, (note,)
