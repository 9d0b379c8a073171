"""When float16 holds the strip of a bias: what kernels read of it then takes half the space.

Distances are decided by plain numbers. Tables are learned or computed, and a look at their numbers would wait for the
GPU, so both dtypes are packed and each head says which of them kernels read: nothing depends on it but time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.distance_bias import DistanceBias
from vispe.attention.bias.strip import Layout, aligned
from vispe.attention.precision import exporting
from vispe.grid import Grid

HALF_RANGE = 65000.0  # of float16, with room for what distances are rounded
LARGEST_SCALE = 2.0**11  # of the logits, up to which the least steps of float16 are below 2^-14
_EPS = 2.0**-11  # relative error of what is rounded to float16


def fits_half(bias: Bias, grid: Grid, scale: float) -> bool:
    """Return whether float16 holds what `pack` makes of a bias with an error that attention does not feel.

    Stored is (bias - largest) / scale, with a relative error of 2^-11. So logits are off by 2^-11 of how far a bias
    lies below the largest, whatever the scale, and that is nothing only where such keys hardly count: for distances
    with slopes of 0 or more, where each token is its own nearest key. The range must hold the farthest key, and below
    2^-14 the error is 2^-25 scales. Plain numbers decide, so slopes and tables that are tensors never fit.
    """
    if not isinstance(bias, DistanceBias) or isinstance(bias.slopes, Tensor) or exporting():
        return False
    if not 0 < scale <= LARGEST_SCALE or min(bias.slopes) < 0:
        return False
    return max(bias.slopes) * _farthest(bias, grid) <= HALF_RANGE * scale


def _farthest(bias: DistanceBias, grid: Grid) -> float:
    """Return a bound of the distances on a grid: lengths along the axes are summed."""
    spacing = bias.spacing or grid.spacing or (1.0,) * grid.axes
    if bias.normalize == "max":
        return 1.0
    squared = bias.metric == "squared"
    sides = [(n - 1) * s for n, s in zip(grid.shape, spacing, strict=True)]
    bound = sum(side * side if squared else side for side in sides)
    if bias.normalize == "none":
        return bound
    # the longest axis alone is less than the largest distance on the reference grid
    reference = bias.reference or grid.reference or grid.shape
    least = max((n // 2 if bias.wrap else n - 1) * s for n, s in zip(reference, spacing, strict=True))
    return bound / (least * least if squared else least) if least else bound


def widest_range(dtype: torch.dtype, scale: float) -> float:
    """Return how far the numbers of a head may lie apart for `pack_both` to round them to float16.

    Attention in `dtype` rounds its output with a relative error of u, 2^-11 in float16 and 2^-8 in bfloat16. An error
    of the logits changes weights by as much, so none may be above u. Numbers are stored as (bias - middle) / scale, of
    which none is above range / (2 scale), so rounded by 2^-12 range at most, and below 2^-14 by 2^-25 scales. That
    gives a range of 2 in float16 and of 16 in bfloat16. A dense mask in `dtype` has errors up to u max |bias|, and
    2^-12 range is at most 2^-11 max |bias|: as much in float16, an eighth of it in bfloat16. 0 where nothing fits.
    """
    if not 0 < scale <= LARGEST_SCALE or dtype not in (torch.float16, torch.bfloat16):
        return 0.0
    return 2 * min(torch.finfo(dtype).eps / 2 / _EPS, HALF_RANGE * scale)


def pack_both(
    runs: Tensor, edge: Tensor, layout: Layout, scale: float, dtype: torch.dtype, *, lead: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `strip.pack` does in float32, with a third number per head, and the runs once more in float16.

    The numbers (h, 3) are those of prefix keys, and 1 where the copy of a head holds the very numbers of its runs.
    These are rounded to float16 where no two of them, infinities aside, are further apart than `widest_range`, and left
    as they are elsewhere.

    Args:
        runs: (h, `Layout.length`) of `strip.build`.
        edge: (h, 2) of `strip.build`.
        layout: of the runs.
        scale: factor of the logits.
        dtype: of queries, float16 or bfloat16.
        lead: that of the layout.
    """
    runs, edge = runs.detach().float(), edge.detach().float()
    finite = runs.isfinite()
    low = torch.where(finite, runs, torch.inf).amin(1, keepdim=True)
    high = torch.where(finite, runs, -torch.inf).amax(1, keepdim=True)
    fits = high - low <= widest_range(dtype, scale)
    # softmax does not see what all logits of a row have in common: the middle leaves the smallest numbers to be rounded
    top = torch.where(
        fits, (low + high) / 2, torch.maximum(runs, edge.amax(1)[:, None]).amax(1, keepdim=True)
    )
    top = torch.where(top.isfinite(), top, 0.0)
    runs, edge = (runs - top) / scale, (edge - top) / scale
    copy = runs.half()
    # all programs read the same numbers, whichever of the two they read
    runs = torch.where(fits, copy.float(), runs)
    return aligned(runs, layout, lead), torch.cat([edge, fits.float()], 1), aligned(copy, layout, lead)
