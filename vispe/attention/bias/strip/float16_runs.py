"""Storage of bias strips in float16, which halves the memory traffic of the kernels.

For distance biases this is decided from their Python floats. Tables are tensors, and reading their values would wait
for the GPU, so both dtypes are packed, with a flag per head that selects the one to read: only the speed depends on it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.distance_bias import DistanceBias
from vispe.attention.bias.strip.layout import Layout
from vispe.attention.bias.strip.runs import aligned
from vispe.attention.precision import exporting
from vispe.grid import Grid

HALF_RANGE = 65000.0  # range of float16, less a margin for the rounding of distances
LARGEST_SCALE = 2.0**11  # scale of the logits up to which subnormal float16 steps cause errors below 2^-14
_EPS = 2.0**-11  # relative rounding error of float16


def fits_float16(bias: Bias, grid: Grid, scale: float) -> bool:
    """Return whether the packed strip of a bias can be stored in float16 without a relevant error.

    The strip holds (bias - max) / scale with a relative error of 2^-11, so the error of a logit is 2^-11 of its
    distance below the maximum. This is negligible only where such keys have small weights: for distances with
    non-negative slopes, where each token is its own nearest key. The farthest key must be within the range; subnormal
    values add an error of 2^-25 scales. Tensors (learned slopes, tables) are never read and return False.
    """
    if not isinstance(bias, DistanceBias) or isinstance(bias.slopes, Tensor) or exporting():
        return False
    if not 0 < scale <= LARGEST_SCALE or min(bias.slopes) < 0:
        return False
    return max(bias.slopes) * _max_distance(bias, grid) <= HALF_RANGE * scale


def _max_distance(bias: DistanceBias, grid: Grid) -> float:
    """Return an upper bound of the distances on a grid: the sum of the extents along the axes."""
    spacing = bias.spacing or grid.spacing or (1.0,) * grid.axes
    if bias.normalize == "max":
        return 1.0
    squared = bias.metric == "squared"
    extents = [(n - 1) * s for n, s in zip(grid.shape, spacing, strict=True)]
    bound = sum(extent * extent if squared else extent for extent in extents)
    if bias.normalize == "none":
        return bound
    # a lower bound of the largest distance on the reference grid: its longest axis
    reference = bias.reference or grid.reference or grid.shape
    largest = max((n // 2 if bias.wrap else n - 1) * s for n, s in zip(reference, spacing, strict=True))
    return bound / (largest * largest if squared else largest) if largest else bound


def widest_range(dtype: torch.dtype, scale: float) -> float:
    """Return the largest range (max - min) of the biases of a head that `pack_with_copy` rounds to float16, 0 for none.

    Attention in `dtype` rounds its output with a relative error of u, 2^-11 in float16 and 2^-8 in bfloat16. An error
    of a logit changes its weight by the same relative amount, so it must not exceed u. The strip holds
    (bias - middle) / scale, at most range / (2 scale), so its rounding error is at most 2^-12 range, and 2^-25 scales
    for subnormal values. This allows a range of 2 in float16 and of 16 in bfloat16. For comparison, a dense mask in
    `dtype` has errors up to u max |bias|, and 2^-12 range <= 2^-11 max |bias|: the same in float16, an eighth of it in
    bfloat16.
    """
    if not 0 < scale <= LARGEST_SCALE or dtype not in (torch.float16, torch.bfloat16):
        return 0.0
    return 2 * min(torch.finfo(dtype).eps / 2 / _EPS, HALF_RANGE * scale)


def pack_with_copy(
    runs: Tensor, edge: Tensor, layout: Layout, scale: float, dtype: torch.dtype, *, lead: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return runs in float32, prefix biases with a flag (h, 3), and a float16 copy of the runs.

    Like `runs.pack`, but with a copy. The third number of a head is 1 if its copy is exact: its runs are then rounded
    to float16 in both. This is the case if the range of its finite values is at most `widest_range`.

    Args:
        runs: (h, `Layout.length`) from `runs.build`.
        edge: (h, 2) from `runs.build`.
        layout: layout of the runs.
        scale: factor of the logits.
        dtype: dtype of the queries, float16 or bfloat16.
        lead: `Layout.lead`, or 0.
    """
    runs, edge = runs.detach().float(), edge.detach().float()
    fits, shift = copy_shift(runs, edge, scale, dtype)
    runs, edge = (runs - shift) / scale, (edge - shift) / scale
    copy = runs.half()
    # both arrays hold equal values, so that results do not depend on which one a program reads
    runs = torch.where(fits, copy.float(), runs)
    return aligned(runs, layout, lead), torch.cat([edge, fits.float()], 1), aligned(copy, layout, lead)


def copy_shift(runs: Tensor, edge: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return whether the copy of `pack_with_copy` is exact, and the constants that it subtracts, (h, 1) each.

    Softmax ignores a constant per row; subtracting the middle of the range gives the smallest rounding errors.
    """
    finite = runs.isfinite()
    low = torch.where(finite, runs, torch.inf).amin(1, keepdim=True)
    high = torch.where(finite, runs, -torch.inf).amax(1, keepdim=True)
    fits = high - low <= widest_range(dtype, scale)
    shift = torch.where(
        fits, (low + high) / 2, torch.maximum(runs, edge.amax(1)[:, None]).amax(1, keepdim=True)
    )
    return fits, torch.where(shift.isfinite(), shift, 0.0)
