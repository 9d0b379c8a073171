"""T5's buckets of relative positions, exact for near offsets and logarithmic for far ones, on grids (1910.10683)."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.functions import OffsetBias
from vispe.attention.precision import at_least_float32
from vispe.encodings.base import Biased
from vispe.encodings.registry import register
from vispe.errors import OptionError, counted
from vispe.grid import Positions
from vispe.utils.options import Axes, NonNegativeFloat, PositiveFloat, PositiveInt, check_per_axis


def t5_buckets(distance: Tensor, count: int, max_distance: int) -> Tensor:
    """Return the bucket of each distance, int64: exact below count // 2, logarithmic from there on."""
    exact = count // 2
    # float32 as in the released models: rounding decides where a logarithm is close to an integer
    far = torch.log(distance.float().clamp(min=exact) / exact) / math.log(max_distance / exact)
    # distances from max_distance on share the last bucket
    far = (exact + (far * (count - exact)).long()).clamp(max=count - 1)
    return torch.where(distance < exact, distance.long(), far)


def relative_buckets(rel: Tensor, count: int, max_distance: int, causal: bool = False) -> Tensor:
    """Return the bucket of each relative position, key minus query, int64.

    Args:
        rel: integers or floats.
        count: number of buckets; without `causal`, half of them for later keys.
        max_distance: distance from which on all share a bucket.
        causal: later keys count as distance 0.

    Example:
        >>> relative_buckets(torch.tensor([-2, -1, 0, 1, 2]), 32, 128).tolist()
        [2, 1, 0, 17, 18]
    """
    if causal:
        # later keys, with a negative distance, share bucket 0
        return t5_buckets((-rel).clamp(min=0), count, max_distance)
    half = count // 2
    # keys after the query have the second half of the buckets, whose first is not used: offsets in (0, 1) round to 0
    return t5_buckets(rel.abs(), half, max_distance) + half * (rel >= 1)


@register
class T5Buckets(Biased):
    """Adds a learned number per head and bucket of the offset of two patches; far offsets share logarithmic buckets.

    bias[h] = sum over axes a of table[a, bucket(p_j - p_i along a), h]          arXiv 1910.10683, section 2.1

    The first half of the buckets is for keys before or at the query, the second for keys after it; in each half, the
    first half is exact and the rest grows logarithmically to `max_distance`. Bare ``t5``, also called ``t5.axial``, has
    a table per axis; ``t5.radial`` one for the distance, without direction. Tables start at 0, without effect.

    Args:
        num_heads: heads, h.
        axes: number of grid axes.
        mode: 'axial' adds over the axes as above; 'radial' uses the euclidean distance, and all buckets for it.
        num_buckets: buckets of a table.
        max_distance: distance, in units of the spacing, from which on all share a bucket.
        causal: later keys count as distance 0 and have no buckets, for a causal softmax along 1 axis.
        std: standard deviation of the initialisation.
        spacing: distance between neighbouring patches per axis, instead of `Grid.spacing`.

    Shapes: pos (n, axes) -> bias (1, h, n, n); table (axes, buckets, h), or (1, buckets, h) of 'radial'. Prefix rows
        and columns are 0.
    New resolution: no resampling needed; far offsets share the last bucket.
    Cost: buckets h parameters per axis and layer, O(1) per score.
    Invariant to: translation; 'radial' to rotation by any angle and flips.
    Raises: ShapeError if `pos` has other axes; OptionError for incompatible options.
    Differs from the reference: grids of several axes; a table per layer, while T5 shares that of its first layer; real
        offsets are rounded towards 0 where buckets are exact.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("t5", num_heads=2)
        >>> encoding.bias(Grid((2, 3)).positions(), 0).dense().shape
        torch.Size([1, 2, 6, 6])
    """

    name = "t5"
    paper = "Exploring the Limits of Transfer Learning with T5, https://arxiv.org/abs/1910.10683"
    year = 2019
    ndim = (1, 2, 3)
    presets: ClassVar[dict[str, dict[str, Any]]] = {"axial": {"mode": "axial"}, "radial": {"mode": "radial"}}
    fused = True
    encodes = ("distance", "direction")
    invariant = ("translation",)
    formula = r"b_h = \sum_a B_{a, \operatorname{bucket}(p_{ja} - p_{ia}), h}"
    tested_options = (
        "num_buckets=8,max_distance=5,std=1",
        "mode=radial,axes=3,std=0.3",
        "axes=1,causal=true,std=0.3",
        "spacing=[2,0.5],std=0.3",
    )
    preset_invariant: ClassVar[dict[str, tuple[str, ...]]] = {
        "radial": ("translation", "quarter_turns", "reflection", "rotation")
    }

    num_heads: PositiveInt
    axes: Axes = 2
    mode: Literal["axial", "radial"] = "axial"
    num_buckets: PositiveInt = 32
    max_distance: PositiveInt = 128
    causal: bool = False
    std: NonNegativeFloat = 0.0
    spacing: tuple[PositiveFloat, ...] | None = None

    def __post_init__(self) -> None:
        self._accept(self.axes)
        check_per_axis("spacing", self.spacing, self.axes)
        if self.causal and (self.axes > 1 or self.mode == "radial"):
            raise OptionError(
                f"causal=True counts steps back along 1 axis, got axes={self.axes}, mode={self.mode!r}. Use "
                "axes=1, or omit causal."
            )
        one_way = self.causal or self.mode == "radial"
        smallest = 2 if one_way else 4
        # exact buckets per direction
        exact = (self.num_buckets if one_way else self.num_buckets // 2) // 2
        if self.num_buckets < smallest or self.max_distance <= exact:
            raise OptionError(
                f"t5 needs num_buckets of {smallest} or more and max_distance above their "
                f"{counted(exact, 'exact bucket')}, got num_buckets={self.num_buckets}, "
                f"max_distance={self.max_distance}."
            )
        tables = 1 if self.mode == "radial" else self.axes
        self.table = nn.Parameter(torch.empty(tables, self.num_buckets, self.num_heads))
        self.reset_parameters()

    @property
    def per_layer(self) -> bool:
        """True: every layer has its own a table."""
        return True

    def reset_parameters(self) -> None:
        """Draw the table with standard deviation `std`."""
        nn.init.normal_(self.table, std=self.std)

    def bias(self, pos: Positions, layer: int, x: Tensor | None = None) -> Bias | None:
        """Return the bias, the same for every block that has this table."""
        self._need_axes(pos)
        return OffsetBias(self._read, pos, spacing=self.spacing, depends_on=self._sources())

    def _read(self, step: Tensor) -> Tensor:
        """Return the table values (h, m) of offsets (m, axes)."""
        table, count = at_least_float32(self.table), self.num_buckets
        if self.mode == "radial":
            length = torch.linalg.vector_norm(step, dim=-1)
            return table[0].index_select(0, t5_buckets(length, count, self.max_distance)).t()
        buckets = relative_buckets(step, count, self.max_distance, self.causal)
        # of shape (m, h) per axis, summed over the axes
        reads = [part.index_select(0, along) for part, along in zip(table, buckets.unbind(-1), strict=True)]
        return sum(reads[1:], reads[0]).t()
