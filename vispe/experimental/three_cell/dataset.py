"""Three-cell benchmark of relative positions (LOOPE, arXiv 2504.14386): images, labels and scores.

A black image has one red, one green and one blue cell. Six bits encode which of green and blue is nearer to
red, the orientation of the three cells, the larger of two areas, and whether the vector sum of the cells is
outside of the grid. Without position information, a ViT has the same set of tokens for every image. Therefore
the baseline is the `majority` of the labels, not 50 %.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from itertools import product
from typing import Annotated

import torch
from torch import Tensor

from vispe.errors import OptionError, ShapeError
from vispe.utils.interval import Interval
from vispe.utils.options import checked

BITS = ("d_rg>d_rb", "d_rb>d_rg", "orientation>0", "A_rg>A_rb", "A_rb>A_rg", "vector_sum_outside")
MAX_SQUARED = 338  # squared length of the offsets in a 14 x 14 grid that the sampler uses
_ATTEMPTS = 100  # draws of green and blue before the red cell is drawn again


@dataclass(frozen=True)
class ThreeCellScores:
    """Accuracies in percent.

    Attributes:
        distance: mean of bits 0 and 1.
        orientation: accuracy of bit 2.
        area: mean of bits 3 and 4.
        vector_sum: accuracy of bit 5.
        average: unweighted mean of the four scores above.
        distance_exact: percentage of images with both bits of the distance correct.
        area_exact: percentage of images with both bits of the area correct.
        balanced: mean over the bits of the mean accuracy on its ones and on its zeros.

    Example:
        >>> target = torch.tensor([[1, 0, 1, 0, 0, 0], [0, 1, 1, 0, 0, 0]])
        >>> scores = majority(target)
        >>> scores.distance, scores.orientation
        (50.0, 100.0)
    """

    distance: float
    orientation: float
    area: float
    vector_sum: float
    average: float
    distance_exact: float
    area_exact: float
    balanced: float

    def to_dict(self) -> dict[str, float]:
        """Return the fields."""
        return asdict(self)


def labels(cells: Tensor, grid: int = 14) -> Tensor:
    """Return the six bits (n, 6) int64 of the red, green and blue cells.

    Args:
        cells: (n, 3, 2) int64, (x, y) = (column, row) of red, green, blue.
        grid: cells per side; the sum of the three lies outside when both of its coordinates exceed grid - 1.

    Raises:
        ShapeError: the cells have another shape or type, or lie outside of the grid.

    Example:
        >>> labels(torch.tensor([[[0, 0], [3, 0], [0, 2]]])).tolist()  # blue is nearer, the three turn right
        [[1, 0, 1, 0, 0, 0]]
    """
    if cells.ndim != 3 or cells.shape[1:] != (3, 2) or cells.is_floating_point() or cells.is_complex():
        raise ShapeError(
            f"labels: cells must be integers (n, 3, 2), got {tuple(cells.shape)} {cells.dtype}. Use int64."
        )
    if cells.numel() and not (int(cells.min()) >= 0 and int(cells.max()) < grid):
        raise ShapeError(
            f"labels needs cells in a grid of {grid} x {grid}, got coordinates from {int(cells.min())} to "
            f"{int(cells.max())}."
        )
    (xr, yr), (xg, yg), (xb, yb) = (cells[:, i].long().unbind(-1) for i in range(3))
    to_green, to_blue = (xr - xg) ** 2 + (yr - yg) ** 2, (xr - xb) ** 2 + (yr - yb) ** 2
    turn = (xg - xr) * (yb - yr) - (yg - yr) * (xb - xr)
    green, blue = ((yr + yg) * (xg - xr)).abs(), ((yr + yb) * (xb - xr)).abs()  # twice the areas
    far = (xr + xg + xb > grid - 1) & (yr + yg + yb > grid - 1)
    bits = (to_green > to_blue, to_blue > to_green, turn > 0, green > blue, blue > green, far)
    return torch.stack(bits, -1).long()


@checked
def score(
    logits: Tensor, target: Tensor, threshold: Annotated[float, Interval(above=0, below=1)] = 0.5
) -> ThreeCellScores:
    """Return the accuracies of a model's logits.

    Args:
        logits: (n, 6); a bit is 1 where the sigmoid exceeds `threshold`.
        target: (n, 6) bits.
        threshold: between 0 and 1.

    Raises:
        ShapeError: the shapes are not (n, 6) with n > 0, or differ.
        OptionError: the threshold is not between 0 and 1.

    Example:
        >>> target = torch.tensor([[1, 0, 1, 0, 0, 0]])
        >>> score(2.0 * target - 1, target).average
        100.0
    """
    if logits.shape != target.shape or logits.ndim != 2 or logits.shape[1] != 6 or not len(logits):
        raise ShapeError(
            f"score needs logits and labels (n, 6), got {tuple(logits.shape)} and {tuple(target.shape)}."
        )
    expected = target > 0.5
    right = (logits.sigmoid() > threshold) == expected
    bit = [100 * float(v) for v in right.double().mean(0)]
    parts = ((bit[0] + bit[1]) / 2, bit[2], (bit[3] + bit[4]) / 2, bit[5])
    sides = [right[:, i][expected[:, i] == value] for i in range(6) for value in (True, False)]
    balanced = [
        sum(100 * float(s.double().mean()) for s in pair if len(s)) / sum(len(s) > 0 for s in pair)
        for pair in zip(sides[::2], sides[1::2], strict=True)
    ]
    return ThreeCellScores(
        *parts,
        sum(parts) / 4,
        100 * float((right[:, 0] & right[:, 1]).double().mean()),
        100 * float((right[:, 3] & right[:, 4]).double().mean()),
        sum(balanced) / 6,
    )


def majority(target: Tensor, train: Tensor | None = None) -> ThreeCellScores:
    """Return the scores of the best constant answer, the baseline without position.

    Args:
        target: bits (n, 6) of the evaluated split.
        train: bits of the split that determines the answer; `target` by default.

    Raises:
        ShapeError: the bits are not (n, 6) with n > 0.

    Example:
        >>> majority(torch.tensor([[1, 0, 1, 0, 0, 0]] * 3 + [[0, 1, 1, 0, 0, 0]])).orientation
        100.0
    """
    rate = (target if train is None else train).double().mean(0)
    answer = torch.where(rate > 0.5, 1.0, -1.0)
    return score(answer.expand(len(target), -1), target)


def sample_cells(count: int, grid: int = 14, generator: torch.Generator | None = None) -> Tensor:
    """Sample the cells (n, 3, 2) int64 of `count` images, (x, y) of red, green and blue, never collinear.

    In expectation, green and blue are at equal distance from red in a third of the images, green is nearer in a third,
    and blue in a third: offsets are integer pairs grouped by their squared length.

    Args:
        count: number of images.
        grid: cells per side, at least 3.
        generator: random generator.

    Raises:
        OptionError: a number is too small.

    Example:
        >>> sample_cells(5, grid=4, generator=torch.Generator().manual_seed(0)).shape
        torch.Size([5, 3, 2])
    """
    if count < 0 or grid < 3:
        raise OptionError(
            f"sample_cells needs count of 0 or more and grid of 3 or more, got count={count}, grid={grid}."
        )
    ring, size = _rings(grid)
    # kind of image: 0 for equal distances, 1 for green nearer, 2 for blue nearer
    mode = torch.randint(3, (count,), generator=generator)
    cells = torch.zeros(count, 3, 2, dtype=torch.int64)
    left, red, tries = torch.arange(count), _draw(grid, (count, 2), generator), 0
    while len(left):
        # two different distances
        first = _draw(len(size), (len(left),), generator)
        second = _draw(len(size) - 1, (len(left),), generator)
        second = second + (second >= first)
        near, far = torch.minimum(first, second), torch.maximum(first, second)
        now = mode[left]
        of_green = torch.where(now == 0, first, torch.where(now == 1, near, far))
        of_blue = torch.where(now == 0, first, torch.where(now == 1, far, near))
        pair = [torch.rand(len(left), generator=generator) for _ in range(2)]
        green, blue = (ring[k, (u * size[k]).long()] for k, u in zip((of_green, of_blue), pair, strict=True))
        drawn = torch.stack([red, red + green, red + blue], 1)
        inside = ((drawn >= 0) & (drawn < grid)).flatten(1).all(1)
        good = inside & (green[:, 0] * blue[:, 1] != green[:, 1] * blue[:, 0])  # not on one line, nor equal
        cells[left[good]] = drawn[good]
        left, red, tries = left[~good], red[~good], tries + 1
        # near a border, few pairs are inside of the grid
        if tries % _ATTEMPTS == 0:
            red = _draw(grid, (len(left), 2), generator)
    return cells


def images(cells: Tensor, grid: int = 14, patch_size: int = 16) -> Tensor:
    """Return images (n, 3, grid * patch, grid * patch) float32 in [0, 1] of cells (n, 3, 2).

    Raises:
        ShapeError: the cells have another shape or type, or lie outside of the grid.

    Example:
        >>> images(torch.tensor([[[0, 0], [3, 0], [0, 2]]]), grid=4, patch_size=2).shape
        torch.Size([1, 3, 8, 8])
    """
    labels(cells, grid)  # checks them
    rendered = torch.zeros(len(cells), 3, grid, grid, device=cells.device)
    n = torch.arange(len(cells), device=cells.device)
    for colour in range(3):
        rendered[n, colour, cells[:, colour, 1], cells[:, colour, 0]] = 1.0
    return rendered.repeat_interleave(patch_size, 2).repeat_interleave(patch_size, 3)


def _draw(high: int, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    return torch.randint(high, shape, generator=generator)


def _rings(grid: int) -> tuple[Tensor, Tensor]:
    """Return offsets by squared length, shortest first, for lengths of several offsets: (k, most, 2), counts (k,)."""
    limit = MAX_SQUARED if grid == 14 else 2 * (grid - 1) ** 2
    reach = int(limit**0.5)
    offsets: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for a, b in product(range(-reach, reach + 1), repeat=2):
        if a * a + b * b <= limit:
            offsets[a * a + b * b].append((a, b))
    rings = [offsets[n] for n in sorted(offsets) if len(offsets[n]) > 1]
    most = max(len(r) for r in rings)
    padded = [r + [(0, 0)] * (most - len(r)) for r in rings]
    return torch.tensor(padded), torch.tensor([len(r) for r in rings])
