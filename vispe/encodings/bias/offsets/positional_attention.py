"""Positional attention: logits computed from positions only (opallab/positional_attention)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.dense import LowRankBias
from vispe.encodings.base import Additive, Biased
from vispe.encodings.creation import create_encoding
from vispe.encodings.parts.layers import PreciseLinear
from vispe.encodings.parts.preparation import reads_cells
from vispe.encodings.registry import register
from vispe.errors import OptionError, ShapeError
from vispe.grid import Positions
from vispe.utils.options import PositiveInt


@register
class PositionalAttention(Biased):
    """Attention weights depend only on positions; the content of patches affects only the values.

    logits[h, i, j] = (W_q[h] p_i + b_q[h]) . (W_k[h] p_j + b_k[h]) / sqrt(d_p)          arXiv 2410.01686

    p is a position table of width d_p, computed by an additive encoding; the product of queries and keys is omitted.
    It shows which part of a task needs no content in attention, and is a baseline for heads that attend by position.

    Args:
        num_heads: heads, h.
        grid: shape of the model's grid, for tables that need it; supplied by the host.
        table: spec of the additive encoding that computes p: 'sincos2d', 'learned', 'sincos2d+learned', ...; its
            parameters are per layer.
        pos_dim: width of p, d_p, and of the queries and keys of every head, independent of the width of the model.

    Shapes: pos (n, axes) -> logits (1, h, n, n); rows and columns of prefix tokens are 0, so a class token attends to
        all tokens equally.
    New resolution: as the table.   Cost: 2 h d_p (d_p + 1) parameters per layer; the weights are the same for all
        samples, and only n h d_p columns are computed.
    Invariant to: nothing, as the table; to the content of the patches, except for values.
    Raises: OptionError for a table that is not additive; ShapeError for axes that the table does not support, or if
        samples of several grids are packed and the table is that of one grid (learned, ranked, ...).
    Differs from the reference: any table of positions, on grids; the layer only, not the network around it. A
        pretrained model must be trained again, since its queries and keys are no longer read.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("positional_attention", num_heads=2, pos_dim=8)
        >>> encoding.bias(Grid((2, 3)).positions(), 0).dense().shape
        torch.Size([1, 2, 6, 6])
    """

    name = "positional_attention"
    paper = "Positional Attention: Expressivity and Learnability of Algorithmic Computation, https://arxiv.org/abs/2410.01686"
    year = 2024
    ndim = (1, 2, 3)
    fused = True
    encodes = ("position",)
    formula = r"a_{hij} = \frac{(W^q_h p_i + b^q_h) \cdot (W^k_h p_j + b^k_h)}{\sqrt{d_p}}"
    tested_options = ("table=learned,pos_dim=5", "table=sincos2d+learned,pos_dim=8")

    num_heads: PositiveInt
    grid: tuple[PositiveInt, ...] | None = None
    table: Any = "sincos2d"
    pos_dim: PositiveInt = 64

    def __post_init__(self) -> None:
        facts = {} if self.grid is None else {"grid": self.grid}
        encoding = create_encoding(self.table, dim=self.pos_dim, num_heads=self.num_heads, **facts)
        if any(not isinstance(e, Additive) or e.reads_tokens for e in encoding.parts()):
            raise OptionError(
                f"positional_attention needs an additive encoding as table, got table={self.table!r}. Use one that "
                "does not read tokens, such as sincos2d, fourier or learned."
            )
        self.table = encoding.spec if self.table is encoding else self.table  # JSON-able
        self.places = encoding
        self._accept(*(n for n in (1, 2, 3) if all(n in e.ndim for e in encoding.parts())))
        self.qk_proj = PreciseLinear(self.pos_dim, 2 * self.num_heads * self.pos_dim)

    @property
    def per_layer(self) -> bool:
        """True: every layer has its own positional queries and keys."""
        return True

    def prepare(
        self, pos: Positions, generator: torch.Generator | None = None, draws: dict[str, Tensor] | None = None
    ) -> Positions:
        """Return the positions with the draws of the table."""
        return self.places.prepare(pos, generator, draws)

    def reset_parameters(self) -> None:
        """Initialise the table as its class does, and the projection as torch does."""
        self.places.reset_parameters()
        self.qk_proj.reset_parameters()

    def bias(self, pos: Positions, layer: int, x: Tensor | None = None) -> Bias | None:
        """Return the logits as columns of queries and keys."""
        self._need_axes(pos)
        self._check_sizes(pos)
        row, col = self._eval_cache(self, pos, lambda: self._columns(pos))
        return LowRankBias(row, col, pos).as_logits()

    def _check_sizes(self, pos: Positions) -> None:
        """Raise `ShapeError` if samples have several grids and the table is that of one: cells are of the largest."""
        if len(pos.extent) == 1 or not bool((pos.extent != pos.extent[:1]).any()):
            return
        if any(reads_cells(e) for e in self.places.parts()):
            raise ShapeError(
                f"positional_attention computes table={self.table!r} for one grid at a time, but the batch has samples "
                "of several sizes; pack samples of equal grids, or use a table of coordinates such as sincos2d."
            )

    def _columns(self, pos: Positions) -> tuple[Tensor, Tensor]:
        table = self.places.table(pos)
        # rows of the projection: per head, the query before the key
        read = self.qk_proj(table).unflatten(-1, (self.num_heads, 2, self.pos_dim))
        # mask after the projection, since it has a bias
        row, col = (read * pos.spatial[..., None, None, None]).permute(3, 0, 2, 1, 4).unbind(0)
        # scaled here, because these logits replace the scaled product
        return row * self.pos_dim**-0.5, col
