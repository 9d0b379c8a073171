"""A few windows of a large picture as one sequence, with the coordinates that they have in the whole picture.

Training on the whole picture costs attention among all its patches. Windows that lie far apart cost as much as a small
picture, and hold short and long distances: the idea of segmented sequences, on two axes. Patches stay on the lattice of
the large picture, so their positions are those that patch dropout would leave.

>>> import torch
>>> from vispe import Attention
>>> pictures = torch.randn(2, 3, 112, 168, generator=torch.Generator().manual_seed(0))
>>> taken = segments(pictures, patch=14, count=3, length=2, generator=np.random.default_rng(0))
>>> taken.patches.shape, taken.positions.grid.shape, taken.positions.index.shape
(torch.Size([2, 12, 3, 14, 14]), (8, 12), torch.Size([2, 12]))

Any encoding takes these positions. An absolute table is that of the large grid, resampled before its tokens are taken:

>>> layer = Attention(3 * 14 * 14, num_heads=7, encoding="rope_axial")
>>> layer(taken.patches.flatten(2), taken.positions).shape
torch.Size([2, 12, 588])
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vispe.errors import OptionError, ShapeError
from vispe.grid import Grid, Positions


@dataclass(frozen=True, eq=False)
class Segments:
    """Patches of windows, one sequence for each picture.

    Attributes:
        patches: pixels (b, m, c, p, p), window after window, each row-major.
        positions: where they are in the large grid, with `index`; prefix tokens first, which have no patches here.
    """

    patches: Tensor
    positions: Positions


def segments(
    pictures: Tensor,
    patch: int,
    *,
    count: int,
    length: int,
    generator: np.random.Generator,
    prefix: int = 0,
    reference: tuple[int, int] | None = None,
) -> Segments:
    """Take windows at random, others of each picture, that do not overlap.

    Args:
        pictures: (b, c, H, W), sides multiples of `patch`.
        patch: its side in pixels.
        count: windows of each picture.
        length: side of a window in patches.
        generator: of the draws, one picture after another.
        prefix: tokens without a place that the model puts in front.
        reference: grid of the training resolution, for encodings that rescale.

    Raises:
        ShapeError: pictures that are not cut into whole patches.
        OptionError: more windows than fit side by side.
    """
    if pictures.ndim != 4 or patch < 1 or any(n % patch or not n for n in pictures.shape[-2:]):
        raise ShapeError(
            f"Windows are taken of pictures (b, c, H, W) of whole patches, got {tuple(pictures.shape)} and "
            f"patch={patch}; crop or resize them first."
        )
    h, w = (n // patch for n in pictures.shape[-2:])
    drawn = [window_patches((h, w), count, length, generator) for _ in pictures]
    keep = torch.from_numpy(np.stack(drawn)).to(pictures.device)
    tiles = pictures.unflatten(2, (h, patch)).unflatten(4, (w, patch))
    tiles = tiles.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
    rows = torch.arange(len(pictures), device=pictures.device)[:, None]
    positions = Grid((h, w), prefix=prefix, reference=reference).positions(pictures.device)
    first = torch.arange(prefix, device=pictures.device).expand(len(pictures), -1)
    return Segments(tiles[rows, keep], positions.gather(torch.cat([first, keep + prefix], 1)))


def window_patches(
    shape: tuple[int, int], count: int, length: int, generator: np.random.Generator
) -> np.ndarray:
    """Return the numbers of the patches of some windows, (count length²,) int64, window after window.

    The grid is cut into squares from a random corner on, and so many of them are drawn.

    >>> window_patches((3, 4), 1, 3, np.random.default_rng(0)) % 4
    array([1, 2, 3, 1, 2, 3, 1, 2, 3])

    Args:
        shape: of the grid in patches.
        count: of windows.
        length: side of a window in patches.
        generator: of the draw.

    Raises:
        OptionError: more windows than fit side by side, or numbers below 1.
    """
    fit = [n // length for n in shape] if length > 0 else [0, 0]
    squares = fit[0] * fit[1]
    if not 0 < count <= squares:
        raise OptionError(
            f"count={count} windows of length={length} patches were asked of a grid of {shape}, where {squares} fit "
            "side by side; take fewer or smaller ones, or larger pictures."
        )
    top, left = (int(generator.integers(n % length + 1)) for n in shape)
    drawn = np.sort(generator.choice(squares, count, replace=False))
    rows, columns = drawn // fit[1] * length + top, drawn % fit[1] * length + left
    inside = np.arange(length)
    at = (rows[:, None] + inside)[:, :, None] * shape[1] + (columns[:, None] + inside)[:, None]
    return at.reshape(-1)
