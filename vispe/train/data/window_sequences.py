"""Windows of a large image as one sequence, with their coordinates in the full image.

Training on full images needs attention among all patches. A few distant windows have the cost of a small
image and contain short and long distances (segmented sequences in two dimensions). Patches have their
positions on the grid of the large image, as with patch dropout.

>>> import torch
>>> from vispe import Attention
>>> images = torch.randn(2, 3, 112, 168, generator=torch.Generator().manual_seed(0))
>>> taken = segments(images, patch_size=14, count=3, length=2, generator=np.random.default_rng(0))
>>> taken.patches.shape, taken.positions.grid.shape, taken.positions.index.shape
(torch.Size([2, 12, 3, 14, 14]), (8, 12), torch.Size([2, 12]))

Any encoding supports these positions. An absolute table is resampled to the large grid before its tokens are selected:

>>> layer = Attention(3 * 14 * 14, num_heads=7, encoding="rope_axial")
>>> layer(taken.patches.flatten(2), taken.positions).shape
torch.Size([2, 12, 588])
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vispe.errors import OptionError, ShapeError, counted
from vispe.grid import Grid, Positions


@dataclass(frozen=True, eq=False)
class WindowSequences:
    """Patches of windows, one sequence per image.

    Attributes:
        patches: pixels (b, m, c, p, p), window by window, each row-major.
        positions: positions in the large grid, with `index`; prefix tokens first, which have no patches.
    """

    patches: Tensor
    positions: Positions


def segments(
    images: Tensor,
    patch_size: int,
    *,
    count: int,
    length: int,
    generator: np.random.Generator,
    prefix: int = 0,
    reference: tuple[int, int] | None = None,
) -> WindowSequences:
    """Extract random non-overlapping windows, different ones from each image.

    Args:
        images: (b, c, H, W), with sides divisible by `patch_size`.
        patch_size: patch size in pixels.
        count: number of windows per image.
        length: side of a window in patches.
        generator: random generator.
        prefix: number of prefix tokens without a position.
        reference: grid of the training resolution, for encodings that rescale.

    Raises:
        ShapeError: sides that are not divisible by `patch_size`.
        OptionError: more windows than fit without overlap.
    """
    if images.ndim != 4 or patch_size < 1 or any(n % patch_size or not n for n in images.shape[-2:]):
        raise ShapeError(
            f"segments: images must be (b, c, H, W) with H and W divisible by patch_size={patch_size}, got "
            f"{tuple(images.shape)}. Crop or resize them first."
        )
    h, w = (n // patch_size for n in images.shape[-2:])
    numbers = [window_patches((h, w), count, length, generator) for _ in images]
    keep = torch.from_numpy(np.stack(numbers)).to(images.device)
    tiles = images.unflatten(2, (h, patch_size)).unflatten(4, (w, patch_size))  # (b, c, h, p, w, p)
    tiles = tiles.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)  # (b, h w, c, p, p)
    rows = torch.arange(len(images), device=images.device)[:, None]
    positions = Grid((h, w), prefix=prefix, reference=reference).positions(images.device)
    # prefix tokens come first in the sequence, so patch indices are shifted by their number
    first = torch.arange(prefix, device=images.device).expand(len(images), -1)
    return WindowSequences(tiles[rows, keep], positions.gather(torch.cat([first, keep + prefix], 1)))


def window_patches(
    shape: tuple[int, int], count: int, length: int, generator: np.random.Generator
) -> np.ndarray:
    """Return the patch indices of random windows, (count length²,) int64, window by window.

    The grid is divided into squares from a random offset, and `count` of them are drawn without replacement.

    >>> window_patches((3, 4), 1, 3, np.random.default_rng(0)) % 4
    array([1, 2, 3, 1, 2, 3, 1, 2, 3])

    Args:
        shape: shape of the grid in patches.
        count: number of windows.
        length: side of a window in patches.
        generator: random generator.

    Raises:
        OptionError: more windows than fit without overlap, or numbers below 1.
    """
    fit = [n // length for n in shape] if length > 0 else [0, 0]
    squares = fit[0] * fit[1]
    if not 0 < count <= squares:
        raise OptionError(
            f"segments: at most {counted(squares, 'window')} of length={length} fit into a grid of {shape} without "
            f"overlap, got count={count}. Use fewer or smaller windows, or larger images."
        )
    # the offset distributes the remainder of the grid, so that every patch can be drawn
    top, left = (int(generator.integers(n % length + 1)) for n in shape)
    squares_drawn = np.sort(generator.choice(squares, count, replace=False))
    rows, columns = squares_drawn // fit[1] * length + top, squares_drawn % fit[1] * length + left
    inside = np.arange(length)
    # row-major index in the grid, (count, length, length)
    at = (rows[:, None] + inside)[:, :, None] * shape[1] + (columns[:, None] + inside)[:, None]
    return at.reshape(-1)
