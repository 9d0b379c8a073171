"""Rectangles of pixels: how a page is cut into pieces, and how overlapping pieces are blended again."""

import hashlib
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import nn

from vispe.errors import ShapeError

OVERLAP = 0.25
"""Least share of a tile that it has in common with the next one."""


@dataclass(frozen=True)
class Region:
    """A rectangle of pixels: rows `top` to `bottom`, columns `left` to `right` (ends excluded)."""

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
"""Pixels between the points of a lattice, on which features are compared with those of training."""


def lattice(region: Region) -> tuple[int, int, int, int]:
    """Return the points (first row, end, first column, end) of the lattice in a region; point i is pixel 8 i + 4."""
    ends = (region.top, region.bottom, region.left, region.right)
    top, bottom, left, right = ((end + STEP // 2 - 1) // STEP for end in ends)
    return top, bottom, left, right


def blocks(height: int, width: int, side: int) -> list[Region]:
    """Cut a page into blocks of at most `side` x `side` pixels that do not overlap, row by row."""
    return [
        Region(top, min(top + side, height), left, min(left + side, width))
        for top in range(0, height, side)
        for left in range(0, width, side)
    ]


def tiles(
    height: int, width: int, tile: tuple[int, int], step: int, overlap: float = OVERLAP
) -> list[Region]:
    """Cover a page with overlapping tiles of one size.

    Tiles share at least `overlap` of their side with the next one. All origins are multiples of `step`, and
    the last tile is moved inward instead of being cut.

    Args:
        height: of the page in pixels, a multiple of `step`.
        width: likewise.
        tile: height and width of a tile, multiples of `step`, not larger than the page.
        step: patch size of the model in pixels.
        overlap: share of a tile, below 1.

    Raises:
        ShapeError: sizes that are no multiples of `step`, or a tile that is larger than the page.
    """
    for name, length, side in (("height", height, tile[0]), ("width", width, tile[1])):
        if length % step or side % step or not 0 < side <= length:
            raise ShapeError(
                f"tiles need a {name} and a tile that are multiples of step={step}, the tile not larger than the "
                f"page; got {name}={length}, tile={side}."
            )
    return [
        Region(top, top + tile[0], left, left + tile[1])
        for top in _starts(height, tile[0], step, overlap)
        for left in _starts(width, tile[1], step, overlap)
    ]


def _starts(length: int, side: int, step: int, overlap: float) -> list[int]:
    """Give origins along one axis, evenly spread on the raster of `step`."""
    stride = max(int(side * (1 - overlap)) // step, 1) * step
    return [*range(0, length - side, stride), length - side]


def even_tiles(height: int, width: int, most: int, step: int, overlap: int) -> list[Region]:
    """Cover a page with as few tiles of one size as possible, none larger than needed.

    Tiles lie alike from both ends of an axis, so that a page that is turned is cut in the same way; only where their
    number is odd the middle one may lie half a step off.

    Args:
        height: of the page in pixels, a multiple of `step`.
        width: likewise.
        most: largest side of a tile in pixels, a multiple of `step`.
        step: patch size of the model in pixels.
        overlap: least pixels that a tile has in common with the next one, a multiple of `step` below `most`.
    """
    (tall, tops), (wide, lefts) = (_even(length, most, step, overlap) for length in (height, width))
    return [Region(top, top + tall, left, left + wide) for top in tops for left in lefts]


def _even(length: int, most: int, step: int, overlap: int) -> tuple[int, list[int]]:
    """Give the side of the tiles along an axis, and their origins."""
    if length <= most:
        return length, [0]
    count = -(-(length - overlap) // (most - overlap))
    while True:
        least = -(-(length + (count - 1) * overlap) // (count * step)) * step
        for side in range(least, most + 1, step):
            room = length - side
            first = [round(i * room / (count - 1) / step) * step for i in range((count + 1) // 2)]
            starts = first + [room - start for start in first[: count // 2][::-1]]
            if max(b - a for a, b in pairwise(starts)) <= side - overlap:
                return side, starts
        count += 1


def window(height: int, width: int) -> np.ndarray:
    """Give the weight of each pixel of a tile when tiles are blended.

    A raised cosine along each axis, sin²(pi (i + 1/2) / n): largest in the middle, where a model sees most
    around a pixel, small at the rim, and above zero everywhere, so that a sum of windows can be divided out.

    Returns:
        (height, width) float32.
    """
    rows, columns = (np.sin(np.pi * (np.arange(n) + 0.5) / n) ** 2 for n in (height, width))
    return np.outer(rows, columns).astype(np.float32)


def padding(height: int, width: int, step: int, least: tuple[int, int] = (1, 1)) -> tuple[int, int, int, int]:
    """Pixels to add at (top, bottom, left, right) so that both sides become multiples of `step`.

    Half of them on each side; where the number is odd, the extra pixel goes to the bottom or the right. Sides
    shorter than `least` are brought up to it.
    """
    out: list[int] = []
    for length, floor in ((height, least[0]), (width, least[1])):
        extra = -(-max(length, floor) // step) * step - length
        out += [extra // 2, extra - extra // 2]
    return out[0], out[1], out[2], out[3]


class Tiling:
    """Tiles of a padded page, and where they lie on the page.

    Args:
        regions: each tile, in the padded frame.
        offset: padding at (top, left), in pixels.
        frame: height and width of the page without padding.
        notes: what the user should know.
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
        """Return the part of a tile that lies on the page, in page coordinates."""
        tile, (dy, dx), (height, width) = self.regions[number], self.offset, self.frame
        top, bottom = max(tile.top - dy, 0), min(tile.bottom - dy, height)
        return Region(top, bottom, max(tile.left - dx, 0), min(tile.right - dx, width))

    def crop(self, number: int) -> tuple[slice, slice]:
        """Return the index of `inside(number)` within the tile."""
        tile, part, (dy, dx) = self.regions[number], self.inside(number), self.offset
        top, left = part.top + dy - tile.top, part.left + dx - tile.left
        return slice(top, top + part.shape[0]), slice(left, left + part.shape[1])


def fingerprint(model: nn.Module) -> str:
    """Return the SHA-256 of all weights of a model, to recognise it later."""
    digest = hashlib.sha256()
    for key, value in sorted(model.state_dict().items()):
        digest.update(key.encode())
        digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def common(piece: Region, frame: Region) -> tuple[Region, Region]:
    """Return what two rectangles have in common, in the coordinates of the first and of the second."""
    top, bottom = max(piece.top, frame.top), min(piece.bottom, frame.bottom)
    left, right = max(piece.left, frame.left), min(piece.right, frame.right)
    return (
        Region(top - piece.top, bottom - piece.top, left - piece.left, right - piece.left),
        Region(top - frame.top, bottom - frame.top, left - frame.left, right - frame.left),
    )


class Blend:
    """Sums the class probabilities of tiles into one page, and counts where tiles disagree.

    Args:
        height: of the page in pixels.
        width: likewise.
        n_classes: K.
    """

    def __init__(self, height: int, width: int, n_classes: int) -> None:
        self._sum = np.zeros((n_classes, height, width), np.float32)
        self._weight = np.zeros((height, width), np.float32)
        self._first = np.zeros((height, width), np.uint8)
        self._twice = np.zeros((height, width), bool)
        self._differ = np.zeros((height, width), bool)

    def add(self, region: Region, prob: np.ndarray, weight: np.ndarray | None) -> None:
        """Add probabilities (rows, columns, K) of a region, weighted by `weight` (rows, columns) or 1."""
        where = region.slices
        weight = np.ones(region.shape, np.float32) if weight is None else weight
        own, largest = np.ones(region.shape, np.uint8), prob[..., 0]
        for k in range(1, prob.shape[-1]):  # several times as fast as argmax over a short axis
            own = np.where(prob[..., k] > largest, np.uint8(k + 1), own)
            largest = np.maximum(largest, prob[..., k])
        first = self._first[where]
        self._twice[where] |= first > 0
        self._differ[where] |= (first > 0) & (first != own)
        self._first[where] = np.where(first > 0, first, own)
        for k in range(prob.shape[-1]):
            self._sum[(k, *where)] += prob[..., k] * weight
        self._weight[where] += weight

    def result(self) -> np.ndarray:
        """Return the blended probabilities (K, h, w), float32; the sums are used up."""
        self._sum /= np.maximum(self._weight, np.finfo(np.float32).tiny)
        return self._sum

    @property
    def marks(self) -> tuple[np.ndarray, np.ndarray]:
        """Two (h, w) bool: pixels in several tiles, and those of them to which two tiles give different classes."""
        return self._twice, self._differ

    @property
    def overlap_pixels(self) -> int:
        """Number of pixels that lie in more than one tile."""
        return int(self._twice.sum())

    @property
    def disagreeing_pixels(self) -> int:
        """Number of pixels where two tiles give different classes."""
        return int(self._differ.sum())
