"""Base of `fox` and `cable`: penalties accumulated along the path between two tokens."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.content import GatedBias
from vispe.attention.bias.decomposed import DecomposedBias, grid_line_index
from vispe.attention.bias.dense import SumBias
from vispe.attention.bias.table import TableBias
from vispe.encodings.base import Biased
from vispe.encodings.parts.layers import PreciseLinear
from vispe.errors import OptionError, ShapeError, counted
from vispe.grid import Grid, Positions
from vispe.utils.options import FiniteFloat, PositiveInt


class PathBias(Biased):
    """Bias that sums non-positive log gates of the tokens on a path; subclasses define `log_gate`."""

    ndim = (1, 2)
    fused = True
    encodes: ClassVar[tuple[str, ...]] = ("distance", "content")
    invariant: ClassVar[tuple[str, ...]] = ("translation", "quarter_turns", "reflection")
    reads_tokens = True

    dim: PositiveInt
    num_heads: PositiveInt
    causal: bool = False
    shared: bool = True
    gate_bias: FiniteFloat = 5.0

    def __post_init__(self) -> None:
        if self.causal and not self.shared:
            raise OptionError(
                f"{self.name} has a single gate with causal=True, got shared=False. Omit shared."
            )
        if self.causal:
            self._accept(1)
        self.gate = PreciseLinear(self.dim, self.num_heads if self.shared else 2 * self.num_heads)
        self.reset_parameters()

    @property
    def per_layer(self) -> bool:
        """True: every layer has its own gates."""
        return True

    def reset_parameters(self) -> None:
        """Initialise the gate projection as torch does; its bias is `gate_bias`."""
        self.gate.reset_parameters()
        nn.init.constant_(self.gate.bias, self.gate_bias)

    def log_gate(self, z: Tensor) -> Tensor:
        """Return log gates, 0 or less, from the outputs z of the projection."""
        raise NotImplementedError

    def bias(self, pos: Positions, layer: int, x: Tensor | None = None) -> Bias | None:
        """Return the bias for the tokens `x` (b, n, d)."""
        if self.causal and pos.axes != 1:
            raise ShapeError(
                f"{self.name} needs 1 axis with causal=True, got {counted(pos.axes, 'axis')} ({pos})."
            )
        grid = self._need_grid(pos)
        if x is None:
            raise ShapeError(
                f"{self.name} reads the tokens and needs x (b, n, d), got None. Pass them to bias()."
            )
        gates = self.log_gate(self.gate(x)).transpose(1, 2)
        field = _field(gates, pos, grid)
        first = field if self.shared else field[:, : self.num_heads]
        second = field if self.shared else field[:, self.num_heads :]
        return _line(first, second, pos, grid, self.causal) if pos.axes == 1 else _plane(first, second, pos)


def _field(gates: Tensor, pos: Positions, grid: Grid) -> Tensor:
    """Return gates (b, h, n) scattered to the grid (b, h, n_1, ...), 0 at cells without a token."""
    empty = gates.new_zeros(*gates.shape[:2], grid.patches + 1)
    # tokens without a position share one extra cell, which is cut off
    field = empty.scatter(-1, _cell_index(pos, grid)[:, None].expand_as(gates), gates)
    return field[..., :-1].reshape(*gates.shape[:2], *grid.shape)


def _cell_index(pos: Positions, grid: Grid) -> Tensor:
    """Return the cell index of each token, (b or 1, n); an extra index for tokens without a position."""
    return pos.remember("path index", lambda: torch.where(pos.spatial, pos.numbers(), grid.patches))


def _middles(gates: Tensor) -> Tensor:
    """Return cumulative sums minus half of the last gate: a path counts the gates of its end points by half."""
    return gates.cumsum(-1) - gates / 2


def _line(first: Tensor, second: Tensor, pos: Positions, grid: Grid, causal: bool) -> Bias:
    """Return the bias of tokens on a line, from gates (b, h, n) of paths from the left and from the right."""
    n = first.shape[-1]
    cell = _cell_index(pos, grid)[:, None].expand(*first.shape[:2], -1)

    def gated(sums: Tensor, sides: Tensor) -> Bias:
        # tokens without a position read the 0 appended to the line; their profile is 0 too
        at = F.pad(sums, (0, 1)).gather(-1, cell)
        return GatedBias(at, -at, TableBias(sides[None].to(at.dtype), pos, one_grid=False))

    offset = torch.arange(1 - n, n, device=first.device)
    if causal:  # later keys are masked by the caller
        return gated(first.cumsum(-1), torch.ones_like(offset))
    if first is second:
        return gated(_middles(first), offset.sign())
    return SumBias([gated(first.cumsum(-1), offset > 0), gated(second.cumsum(-1), -(offset < 0).long())])


def _plane(along: Tensor, down: Tensor, pos: Positions) -> Bias:
    """Return the mean over both L-shaped paths, from gates (b, h, gh, gw) of steps along rows and columns."""
    row, col = (grid_line_index(pos, axis)[:, None] for axis in (0, 1))
    # a path is a segment in the query's row or column plus one in the key's; a token reads its own two lines
    cols = _stretches(_middles(along), row, col)
    rows = _stretches(_middles(down.transpose(-1, -2)), col, row)
    return SumBias([DecomposedBias(rows, cols, "query", pos), DecomposedBias(rows, cols, "key", pos)])


def _stretches(sums: Tensor, line: Tensor, cell: Tensor) -> Tensor:
    """Return half of the cost from each token to every position on its line, (b, h, n, positions + 1).

    Args:
        sums: (b, h, lines, positions).
        line: (b or 1, 1, n), line of each token; an extra index for tokens without a position.
        cell: likewise the position on the line.
    """
    shape = (*sums.shape[:2], line.shape[-1])
    # a padded line and position of zeros for tokens without a position
    padded = F.pad(sums, (0, 1, 0, 1))
    index = line.expand(shape)[..., None].expand(*shape, padded.shape[-1])
    lines = padded.gather(-2, index)
    cost = -(lines - lines.gather(-1, cell.expand(shape)[..., None])).abs() / 2
    # no cost for paths to them
    return F.pad(cost[..., :-1], (0, 1))
