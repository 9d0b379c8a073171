"""Decomposed relative positions of SAM, ViTDet and MViTv2: a vector table per axis, multiplied with queries."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.dense import SumBias
from vispe.attention.precision import at_least_float32
from vispe.encodings.base import Biased
from vispe.encodings.parts.bias.relative import offset_rows, read_by_axis
from vispe.encodings.parts.bias.table_interpolation import take
from vispe.encodings.parts.resample import trained_grid
from vispe.encodings.registry import register
from vispe.grid import Positions
from vispe.utils.options import NonNegativeFloat, PositiveInt, Shape, check_per_axis

TABLES = ("rel_pos_t", "rel_pos_h", "rel_pos_w")


@register
class Decomposed(Biased):
    """Adds products of the query with a learned vector for the row offset and one for the column offset of the key.

    logits[i, j] += q_i . (Rh(y_i - y_j) + Rw(x_i - x_j))          arXiv 2112.01526, section 4.1; arXiv 2304.02643

    Entries `rel_pos_h` and `rel_pos_w` (on 3 axes `rel_pos_t`) of released attention layers load unchanged.

    Args:
        dim: width of the tokens; dim / num_heads is that of a head, d_h.
        num_heads: heads, h.
        head_dim: channels of a head, d_h; dim / num_heads by default.
        grid: shape of the token grid at the training resolution, 1 to 3 axes, supplied by the host.
        window: grid shape of the tables; `grid` by default.
        scaled: whether the term is multiplied by the scale of the logits, as in BoTNet; not in SAM and MViTv2.
        shared: one table for all heads instead of one per head.
        std: standard deviation of the truncated normal initialisation; 0: a pretrained model is unchanged at first.

    Presets: ``decomposed.sam`` is the default; ``decomposed.mvitv2`` draws the tables as MViTv2 does.

    Shapes: pos of a grid -> bias (b, h, n, n); tables (2 n_a - 1, d_h), h times as wide unless `shared`. Prefix rows
        and columns are 0.
    New resolution: tables are stretched in each forward, by linear interpolation; parameters are unchanged.
    Cost: sum(2 n_a - 1) d_h parameters per layer; on grids of 2 axes b h n (gh + gw) d_h, else a gather of n x n for
        each axis.
    Invariant to: translation, at equal queries.
    Raises: ShapeError if `pos` is not of a grid with as many axes as there are tables.
    Differs from the reference: the window is the full grid; queries and keys share a grid, without pooling; a
        stretched table keeps its gradient and its parameter.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("decomposed", dim=16, num_heads=2, grid=(4, 4))
        >>> q = torch.ones(1, 2, 6, 8)
        >>> encoding.bias(Grid((2, 3)).positions(), 0).dense(q=q, k=q).shape
        torch.Size([1, 2, 6, 6])
    """

    name = "decomposed"
    paper = "MViTv2: Improved Multiscale Vision Transformers for Classification and Detection, https://arxiv.org/abs/2112.01526"
    year = 2021
    ndim = (1, 2, 3)
    presets: ClassVar[dict[str, dict[str, Any]]] = {"sam": {}, "mvitv2": {"std": 0.02}}
    extrapolates = False
    fused = True
    encodes = ("distance", "direction", "content")
    invariant = ("translation",)
    formula = r"a_{ij} = s \, q_i \cdot k_j + q_i \cdot \left( R^h_{y_i - y_j} + R^w_{x_i - x_j} \right)"
    tested_options = ("scaled=true,shared=false,std=0.5", "window=[5,3],std=0.5")

    dim: PositiveInt
    num_heads: PositiveInt
    head_dim: PositiveInt | None = None
    grid: Shape
    window: tuple[PositiveInt, ...] | None = None
    scaled: bool = False
    shared: bool = True
    std: NonNegativeFloat = 0.0

    def __post_init__(self) -> None:
        self._accept(len(self.grid))
        check_per_axis("window", self.window, len(self.grid))
        # unless shared, the vectors of all heads are concatenated
        channels = self._resolve_head_dim() * (1 if self.shared else self.num_heads)
        self.names = TABLES[-len(self.grid) :]
        for name, n in zip(self.names, self.window or self.grid, strict=True):
            self.register_parameter(name, nn.Parameter(torch.empty(2 * n - 1, channels)))
        self.reset_parameters()

    @property
    def per_layer(self) -> bool:
        """True: every layer has its own tables."""
        return True

    def reset_parameters(self) -> None:
        """Draw the tables from a truncated normal of standard deviation `std`."""
        for table in self.parameters():
            nn.init.trunc_normal_(table, std=self.std) if self.std else nn.init.zeros_(table)

    def rename_checkpoint_keys(self, state_dict: dict[str, Any], parent_prefix: str, prefix: str) -> None:
        """Rename the tables of released checkpoints from the attention layer."""
        take(state_dict, parent_prefix, prefix, {name: name for name in self.names})

    def resample_checkpoint(
        self, state_dict: dict[str, Any], prefix: str, grid: tuple[int, ...] | None
    ) -> None:
        """Resample tables of another grid, as `bias` does."""
        # the size of tables with a fixed `window` does not depend on the grid
        for axis, name in enumerate(self.names if self.window is None else ()):
            table = state_dict.get(prefix + name)
            if table is None or table.ndim != 2:
                continue
            saved_grid = None if grid is None or len(grid) != len(self.grid) else (grid[axis],)
            # one table per axis, each resampled along its axis
            new_grid = (self.grid[axis],)
            if (
                trained_grid(prefix + name, saved_grid, len(table), new_grid, lambda g: 2 * g[0] - 1)
                != new_grid
            ):
                state_dict[prefix + name] = stretched(table, *new_grid).to(table.dtype)

    def bias(self, pos: Positions, layer: int, x: Tensor | None = None) -> Bias:
        """Return the bias of block `layer`."""
        grid = self._need_grid(pos)
        tables = [
            # (2 n - 1, h d_h or d_h) -> (h or 1, 2 n - 1, d_h)
            stretched(getattr(self, name), n).unflatten(1, (-1, self._resolve_head_dim())).transpose(0, 1)
            for name, n in zip(self.names, grid.shape, strict=True)
        ]
        terms = read_by_axis(
            pos,
            grid,
            "all offsets",
            tables,
            lambda n: offset_rows(n, pos.coords.device, None, False),
            scaled=self.scaled,
        )
        return SumBias(terms) if len(terms) > 1 else terms[0]


def stretched(table: Tensor, n: int) -> Tensor:
    """Return a table (2 m - 1, channels) of the offsets of m cells for n cells, by linear interpolation."""
    # comparing a symbolic size would specialise the exported graph
    if not isinstance(n, torch.SymInt) and table.shape[0] == 2 * n - 1:
        return table
    # (rows, channels) -> (1, channels, rows), since interpolation is along the last axis
    return F.interpolate(at_least_float32(table).t()[None], size=2 * n - 1, mode="linear")[0].t()
