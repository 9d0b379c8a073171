"""Penalties that add up along the way from one token to another: the base of `fox` and `cable`."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.content import GatedBias
from vispe.attention.bias.decomposed import DecomposedBias, line_of
from vispe.attention.bias.dense import SumBias
from vispe.attention.bias.table import TableBias
from vispe.encodings.base import Biased
from vispe.encodings.parts.layers import PreciseLinear
from vispe.errors import OptionError, ShapeError
from vispe.grid import Grid, Positions
from vispe.options import Number, Whole


class PathBias(Biased):
    """Sums log gates, 0 or less, of the tokens on the way; classes say by `log_gate` what a gate is."""

    ndim = (1, 2)
    fused = True
    knows: ClassVar[tuple[str, ...]] = ("distance", "content")
    invariant: ClassVar[tuple[str, ...]] = ("translation", "quarter_turns", "reflection")
    reads_tokens = True

    dim: Whole
    num_heads: Whole
    causal: bool = False
    shared: bool = True
    gate_bias: Number = 5.0

    def __post_init__(self) -> None:
        if self.causal and not self.shared:
            raise OptionError(
                f"{self.name}: causal=True looks back only, so it has one gate; leave shared=False out."
            )
        if self.causal:
            self._accept(1)
        self.gate = PreciseLinear(self.dim, self.num_heads if self.shared else 2 * self.num_heads)
        self.reset_parameters()

    @property
    def per_layer(self) -> bool:
        """Every layer has gates of its own."""
        return True

    def reset_parameters(self) -> None:
        """Draw the weight of the gates as torch does; their bias is `gate_bias`."""
        self.gate.reset_parameters()
        nn.init.constant_(self.gate.bias, self.gate_bias)

    def log_gate(self, z: Tensor) -> Tensor:
        """Return the logarithm of gates, 0 or less, for what the projection says."""
        raise NotImplementedError

    def bias(self, pos: Positions, layer: int, x: Tensor | None = None) -> Bias | None:
        """Return the bias for the tokens `x` (b, n, d)."""
        if self.causal and pos.axes != 1:
            raise ShapeError(f"{self.name} needs 1 axis with causal=True, got {pos.axes} axes ({pos}).")
        grid = self._need_grid(pos)
        if x is None:
            raise ShapeError(f"{self.name} reads the tokens; pass x (b, n, d) to bias().")
        gates = self.log_gate(self.gate(x)).transpose(1, 2)
        field = _field(gates, pos, grid)
        first = field if self.shared else field[:, : self.num_heads]
        second = field if self.shared else field[:, self.num_heads :]
        return _line(first, second, pos, grid, self.causal) if pos.axes == 1 else _plane(first, second, pos)


def _field(gates: Tensor, pos: Positions, grid: Grid) -> Tensor:
    """Return gates (b, h, n) of tokens on their grid (b, h, n_1, ...), 0 where there is no token."""
    empty = gates.new_zeros(*gates.shape[:2], grid.patches + 1)
    # tokens without a place share one cell more, which is cut off
    field = empty.scatter(-1, _place(pos, grid)[:, None].expand_as(gates), gates)
    return field[..., :-1].reshape(*gates.shape[:2], *grid.shape)


def _place(pos: Positions, grid: Grid) -> Tensor:
    """Return the number of each token's cell, (b or 1, n); for tokens without a place that of one cell more."""
    return pos.remember("path place", lambda: torch.where(pos.spatial, pos.numbers(), grid.patches))


def _middles(gates: Tensor) -> Tensor:
    """Return sums along the last axis, with half of the last gate: a way has half of the gates at both ends."""
    return gates.cumsum(-1) - gates / 2


def _line(first: Tensor, second: Tensor, pos: Positions, grid: Grid, causal: bool) -> Bias:
    """Return the bias of tokens on a line, for gates (b, h, n) of ways from the left and from the right."""
    n = first.shape[-1]
    place = _place(pos, grid)[:, None].expand(*first.shape[:2], -1)

    def gated(sums: Tensor, sides: Tensor) -> Bias:
        # tokens without a place read the 0 behind the line; the profile is 0 for them as well
        at = F.pad(sums, (0, 1)).gather(-1, place)
        return GatedBias(at, -at, TableBias(sides[None].to(at.dtype), pos, one_grid=False))

    offset = torch.arange(1 - n, n, device=first.device)
    if causal:  # what is later is masked by the caller
        return gated(first.cumsum(-1), torch.ones_like(offset))
    if first is second:
        return gated(_middles(first), offset.sign())
    return SumBias([gated(first.cumsum(-1), offset > 0), gated(second.cumsum(-1), -(offset < 0).long())])


def _plane(along: Tensor, down: Tensor, pos: Positions) -> Bias:
    """Return the mean over both L-shaped ways, for gates (b, h, gh, gw) of steps along rows and down columns."""
    row, col = (line_of(pos, axis)[:, None] for axis in (0, 1))
    # a way is one stretch in the query's row or column and one in the key's; a token reads its own two lines
    cols = _stretches(_middles(along), row, col)
    rows = _stretches(_middles(down.transpose(-1, -2)), col, row)
    return SumBias([DecomposedBias(rows, cols, "query", pos), DecomposedBias(rows, cols, "key", pos)])


def _stretches(sums: Tensor, line: Tensor, place: Tensor) -> Tensor:
    """Return half of the cost from each token to every place of its line, (b, h, n, places + 1).

    Args:
        sums: (b, h, lines, places).
        line: (b or 1, 1, n), the line of each token; one more than there are for tokens without a place.
        place: likewise its place in the line.
    """
    shape = (*sums.shape[:2], line.shape[-1])
    # a line and a place of zeros serve tokens without a place
    padded = F.pad(sums, (0, 1, 0, 1))
    index = line.expand(shape)[..., None].expand(*shape, padded.shape[-1])
    lines = padded.gather(-2, index)
    cost = -(lines - lines.gather(-1, place.expand(shape)[..., None])).abs() / 2
    # and nothing leads to them
    return F.pad(cost[..., :-1], (0, 1))
