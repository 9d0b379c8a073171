"""Learned relative position bias table of Swin and BEiT, on 1 to 3 axes (arXiv 2103.14030, arXiv 2106.08254)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.table import TableBias
from vispe.encodings.base import Biased
from vispe.encodings.parts.bias.table_interpolation import Resample, drop_index, resample_table, take
from vispe.encodings.parts.resample import trained_grid
from vispe.encodings.registry import register
from vispe.grid import Positions
from vispe.utils.options import NonNegativeFloat, PositiveInt, Shape, check_per_axis

TABLE = "relative_position_bias_table"
# on the attention layer, or at the root for all
HOLDERS = ("", "rel_pos.", "rel_pos_bias.", "shared_rel_pos.")


@register
class TableOfOffsets(Biased):
    """Adds a learned number per head and offset of two patches to the attention logits.

    bias[h, i, j] = table[row of (p_i - p_j), h]          arXiv 2103.14030, section 3.2

    ``rpb.swin`` has the layout of Swin, Video Swin (3 axes) and timm's `RelPosBias`, randomly initialised; ``rpb.beit``
    that of BEiT: three extra rows for class-token pairs, initialised with 0. The entries of such checkpoints load
    unchanged (`relative_position_bias_table` on the attention layer, in `rel_pos`, or shared at the root).

    Args:
        num_heads: heads, h.
        grid: shape of the token grid at the training resolution, 1 to 3 axes, supplied by the host.
        window: grid shape of the table; `grid` by default.
        prefix_values: three more rows, for prefix to patch, patch to prefix and prefix to prefix tokens.
        std: standard deviation of the truncated normal initialisation; 0: no effect at first.
        resample: how another grid reads the table: 'geometric' keeps near offsets and spreads far ones (BEiT, timm);
            'bicubic' stretches all offsets equally.
        share_layers: one table for all layers instead of one each.

    Shapes: pos of a grid -> bias (1, h, n, n); table (prod(2 n_a - 1) + 3 with prefix_values, h). Prefix rows and
        columns are 0 without `prefix_values`.
    New resolution: the table is resampled in each forward, see `resample`; the parameter is unchanged.
    Cost: prod(2 n_a - 1) h parameters per layer, O(1) per score.
    Invariant to: translation.
    Raises: ShapeError if `pos` is not of a grid with as many axes as the table.
    Differs from the reference: any number of prefix tokens, treated equally; the window is the full grid; the resampled
        table keeps its gradient and its parameter, while timm creates a new parameter.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("rpb.swin", num_heads=2, grid=(4, 4))
        >>> encoding.bias(Grid((2, 3)).positions(), 0).dense().shape
        torch.Size([1, 2, 6, 6])
    """

    name = "rpb"
    paper = "Swin Transformer, https://arxiv.org/abs/2103.14030"
    year = 2021
    ndim = (1, 2, 3)
    encodes = ("distance", "direction")
    invariant = ("translation",)
    formula = r"b_{hij} = B_{p_i - p_j, h}"
    tested_options = ("window=[2,5]", "window=[5,7],resample=bicubic", "share_layers=true,std=0.5")
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "swin": {"prefix_values": False, "std": 0.02},
        "beit": {"prefix_values": True, "std": 0.0},
    }
    extrapolates = False
    fused = True

    num_heads: PositiveInt
    grid: Shape
    window: tuple[PositiveInt, ...] | None = None
    prefix_values: bool = False
    std: NonNegativeFloat = 0.02
    resample: Resample = "geometric"
    share_layers: bool = False

    def __post_init__(self) -> None:
        self._accept(len(self.grid))
        check_per_axis("window", self.window, len(self.grid))
        # the rows of pairs with prefix tokens are at the end
        rows = _offsets(self.table_grid) + 3 * self.prefix_values
        self.relative_position_bias_table = nn.Parameter(torch.empty(rows, self.num_heads))
        self.reset_parameters()

    @property
    def table_grid(self) -> tuple[int, ...]:
        """Grid shape of the table."""
        return self.window or self.grid

    @property
    def per_layer(self) -> bool:
        """Whether every layer has its own a table, rather than a shared one."""
        return not self.share_layers

    def reset_parameters(self) -> None:
        """Draw the table from a truncated normal of standard deviation `std`."""
        if self.std:
            nn.init.trunc_normal_(self.relative_position_bias_table, std=self.std)
        else:
            nn.init.zeros_(self.relative_position_bias_table)

    def rename_checkpoint_keys(self, state_dict: dict[str, Any], parent_prefix: str, prefix: str) -> None:
        """Rename the table of released checkpoints, from the attention layer, or from the root if shared by layers."""
        take(state_dict, parent_prefix, prefix, {holder + TABLE: TABLE for holder in HOLDERS})
        drop_index(state_dict, parent_prefix, HOLDERS)

    def resample_checkpoint(
        self, state_dict: dict[str, Any], prefix: str, grid: tuple[int, ...] | None
    ) -> None:
        """Resample a table of another grid, as `bias` does; an unknown grid is assumed to be square."""
        table = state_dict.get(prefix + TABLE)
        if table is None or table.ndim != 2 or self.window is not None:
            return
        # the three rows for pairs with prefix tokens do not depend on the grid
        rows = table.shape[0] - 3 * self.prefix_values
        old = trained_grid(prefix + TABLE, grid, rows, self.grid, _offsets)
        if old == self.grid:
            return
        # (rows, h) -> (h, 2 n_1 - 1, ...)
        values = table[:rows].t().reshape(table.shape[1], *(2 * n - 1 for n in old))
        resampled = resample_table(values, old, self.grid, self.resample).flatten(1).t().to(table.dtype)
        state_dict[prefix + TABLE] = torch.cat([resampled, table[rows:]])

    def bias(self, pos: Positions, layer: int, x: Tensor | None = None) -> Bias:
        """Return the bias, the same for every block that has this table."""
        grid = self._need_grid(pos)
        table = self.relative_position_bias_table.t()
        prefix = table[:, -3:] if self.prefix_values else None
        table = table[:, :-3] if self.prefix_values else table
        # (h, rows) -> (h, 2 n_1 - 1, ...)
        values = table.reshape(self.num_heads, *(2 * n - 1 for n in self.table_grid))
        resampled = resample_table(values, self.table_grid, grid.shape, self.resample)
        return TableBias(resampled, pos, prefix, depends_on=self._sources())


def _offsets(grid: Sequence[int]) -> int:
    """Return the number of distinct offsets between cells of a grid."""
    return math.prod(2 * n - 1 for n in grid)
