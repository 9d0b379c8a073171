"""Positions of samples that are packed into one batch, each with a grid of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from vispe.encodings.base import Biased, Encoding, Rotary
from vispe.encodings.parts.sampler import Sampler
from vispe.errors import ShapeError
from vispe.grid import Positions


def packed(
    coord: Tensor,
    valid: Tensor,
    sizes: list[tuple[int, int]],
    encodings: Sequence[Encoding],
    positions: Callable[[tuple[int, int]], Positions],
) -> Positions:
    """Return the positions of packed patches (b, n, 2): cells of the smallest grid that holds every sample.

    Each sample has the extent of its own grid, so nothing that wraps or normalises sees the others.

    Raises:
        ShapeError: the samples have different grids, and an encoding inside attention resamples per grid.
    """
    shape = (max(h for h, _ in sizes), max(w for _, w in sizes))
    whole = positions(shape)
    grid = whole.grid
    prefix = grid.prefix
    if len(set(sizes)) == 1:
        if coord.shape[1] == grid.patches and bool((coord == whole.coords[:, prefix:]).all() & valid.all()):
            return whole
    else:
        inside = [e for e in encodings if isinstance(e, Biased | Rotary)]
        fixed = dict.fromkeys(e.name for e in inside if not e.extrapolates)
        drawn = dict.fromkeys(e.name for e in encodings if isinstance(e, Sampler))
        if fixed or drawn:
            does = "is resampled" if fixed else "is drawn"
            raise ShapeError(
                f"The batch packs samples of the grids {sorted(set(sizes))}, but {' + '.join(fixed or drawn)} {does} "
                "for one grid at a time; pack samples of equal grids, or choose another encoding."
            )
    coords = coord.to(torch.float32) * valid[..., None]
    index = (coord[..., 0] * shape[1] + coord[..., 1]).long() * valid
    padded, spatial = F.pad(coords, (0, 0, prefix, 0)), F.pad(valid, (prefix, 0), value=False)
    index = F.pad(index, (prefix, 0))
    return Positions(padded, spatial, coords.new_tensor(sizes), index=index, grid=grid)
