"""Positions of samples with different grids in one packed batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from vispe.encodings.base import Biased, Encoding, Rotary
from vispe.encodings.parts.positions.sampler import Sampler
from vispe.errors import ShapeError
from vispe.grid import Positions


def packed(
    coord: Tensor,
    valid: Tensor,
    sizes: list[tuple[int, int]],
    encodings: Sequence[Encoding],
    positions: Callable[[tuple[int, int]], Positions],
) -> Positions:
    """Return the positions of packed patches as cells of the smallest grid that contains every sample.

    The extent of each sample is that of its own grid, so wrapping and normalisation do not depend on other samples.

    Args:
        coord: row and column of each patch (b, n, 2).
        valid: which patches exist (b, n) bool; all other entries are padding.
        sizes: grid (rows, columns) of each sample.
        encodings: all encodings of the model.
        positions: function from a grid shape to its positions.

    Raises:
        ShapeError: the samples have different grids, and an encoding inside attention resamples per grid.
    """
    shape = (max(h for h, _ in sizes), max(w for _, w in sizes))
    full = positions(shape)
    grid = full.grid
    prefix = grid.prefix
    if len(set(sizes)) == 1:
        # complete grids in order use cached positions, and thereby the masks computed from them
        if coord.shape[1] == grid.patches and bool((coord == full.coords[:, prefix:]).all() & valid.all()):
            return full
    else:
        inside = [e for e in encodings if isinstance(e, Biased | Rotary)]
        resampled = dict.fromkeys(e.name for e in inside if not e.extrapolates)
        samplers = dict.fromkeys(e.name for e in encodings if isinstance(e, Sampler))
        if resampled or samplers:
            verb = "is resampled" if resampled else "is sampled"
            raise ShapeError(
                f"{' + '.join(resampled or samplers)} {verb} for one grid at a time, but the batch packs samples of "
                f"several grids, got {sorted(set(sizes))}; pack samples of equal grids, or use another encoding."
            )
    # padding is moved to the origin; (b, n, 2) -> row-major index (b, n)
    coords = coord.to(torch.float32) * valid[..., None]
    index = (coord[..., 0] * shape[1] + coord[..., 1]).long() * valid
    padded, spatial = F.pad(coords, (0, 0, prefix, 0)), F.pad(valid, (prefix, 0), value=False)
    index = F.pad(index, (prefix, 0))
    return Positions(padded, spatial, coords.new_tensor(sizes), index=index, grid=grid)
