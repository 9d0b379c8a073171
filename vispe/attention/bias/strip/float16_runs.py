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
from vispe.attention.bias.strip.packed import FIRST, FLAG, ZERO, entries, pack_index
from vispe.attention.precision import exporting
from vispe.grid import Grid

HALF_RANGE = 65000.0  # range of float16, less a margin for the rounding of distances
LARGEST_SCALE = 2.0**11  # scale of the logits up to which subnormal float16 steps cause errors below 2^-14
_EPS = 2.0**-11  # relative rounding error of float16
_LOWEST = torch.finfo(torch.float32).min


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
    table: Tensor,
    edge: Tensor | None,
    layout: Layout,
    scale: float,
    dtype: torch.dtype,
    index: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return packed runs in float32, prefix biases with a flag (h, 3), and a float16 copy of the runs.

    Like `packed.pack`, but with a copy. The third number of a head is 1 if its copy is exact: its runs are then rounded
    to float16 in both. This is the case if the range of its finite values is at most `widest_range`.

    Args:
        table: (h, 2 n_1 - 1, ...).
        edge: as in `packed.pack`.
        layout: layout of the runs.
        scale: factor of the logits.
        dtype: dtype of the queries, float16 or bfloat16.
        index: `packed.pack_index` of the layout, which is computed if None.
    """
    flat = entries(table, edge, layout, True)
    fits, lowest = copy_range(flat, layout, scale, dtype)
    # softmax ignores a constant per row; subtracting the middle of the range gives the smallest rounding errors
    flat = torch.sub(flat, lowest, alpha=0.5) / scale
    # both arrays hold equal values, so that results do not depend on which one a program reads
    rounded = torch.where(fits, flat.half().float(), flat)
    packed = rounded.index_select(1, pack_index(layout, table.device) if index is None else index)
    flat[:, FLAG : FLAG + 1] = fits
    return packed, flat[:, : FLAG + 1], packed.half()


def copy_range(flat: Tensor, layout: Layout, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return whether the copy of `pack_with_copy` is exact, and the lowest bias, 0 if it is not, (h, 1) each.

    Args as in `pack_with_copy`, with `flat` from `packed.entries`, shifted: the largest bias is 0.
    """
    # in the row layout, the biases of prefix keys are part of the runs
    runs = flat[:, FIRST if not layout.prefix else 0 if layout.rows else ZERO :]
    # a head with +inf or NaN is not shifted, and has no copy
    lowest = runs.nan_to_num(_LOWEST, _LOWEST, 0.0).amin(1, keepdim=True)
    fits = lowest >= -widest_range(dtype, scale)
    return fits, lowest * fits
