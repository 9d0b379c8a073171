"""A bias that is any function of the offset of two tokens, direction included."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from vispe.attention.bias.abstract_bias import Bias, Request
from vispe.attention.bias.table import TableBias
from vispe.attention.precision import no_infinity, readable
from vispe.errors import ShapeError
from vispe.grid import Grid, Positions


class OffsetBias(Bias):
    """``f_h(p_j - p_i)``, and 0 where either token has no place; differentiable in what `f` holds.

    On a grid `f` is called once per offset, and the table of its values takes the fused kernels. Where lengths alone
    decide, `RadialBias` asks for fewer values.

    Args:
        function: takes offsets (m, axes), key minus query, and returns (h or 1, m).
        pos: the positions it is bound to.
        wrap: offsets on the torus of `Positions.extent`, from minus one half of it to below one half.
        spacing: distance between neighbouring cells per axis, in place of that of the positions.
        key: what `function` depends on, where that has no gradient: then masks are kept with the positions.
        made_of: words and tensors that decide what a function without key returns: in evaluation, masks are kept while
            both are equal.

    Raises:
        ShapeError: when it is used, the function returns something else than (h or 1, m).

    Example:
        >>> from vispe import Grid
        >>> OffsetBias(lambda step: step.T, Grid((3,)).positions()).dense()[0, 0]
        tensor([[ 0.,  1.,  2.],
                [-1.,  0.,  1.],
                [-2., -1.,  0.]])
    """

    __slots__ = ("_key", "function", "made_of", "spacing", "wrap")

    def __init__(
        self,
        function: Callable[[Tensor], Tensor],
        pos: Positions | None = None,
        *,
        wrap: bool = False,
        spacing: tuple[float, ...] | None = None,
        key: Hashable | None = None,
        made_of: tuple[Hashable, tuple[Tensor, ...]] | None = None,
    ) -> None:
        super().__init__(pos)
        self.function, self.wrap, self.spacing, self._key = function, wrap, spacing, key
        self.made_of = made_of

    @property
    def invariant(self) -> bool:
        """Whether it depends on nothing but the offset between two tokens."""
        return True

    @property
    def key(self) -> Hashable | None:
        """What it depends on beside its positions; None where that has a gradient."""
        return None if self._key is None else ("offset", self._key, self.wrap, self.spacing)

    @property
    def finite(self) -> bool:
        """Whether its table on a grid is known to hold no infinity; False for free coordinates, and with a key."""
        pos = self.pos
        if self._key is not None or pos is None or pos.grid is None or not pos.in_place or not pos.static:
            return False
        with torch.no_grad():
            return readable(pos.coords) and no_infinity(self.table(pos.grid))

    def _of(self, offset: Tensor, extent: Tensor) -> Tensor:
        """Return the values of the function (h or 1, ...) at offsets (..., axes)."""
        if self.wrap:
            offset = (offset + extent / 2).remainder(extent) - extent / 2
        steps = offset.flatten(0, -2)
        values = self.function(steps)
        if values.ndim != 2 or values.shape[1] != steps.shape[0]:  # len() would fix a symbolic size
            raise ShapeError(
                f"OffsetBias needs a function that returns (heads or 1, {steps.shape[0]}) for as many offsets, got "
                f"{tuple(values.shape)}; give it an axis for heads in front."
            )
        return values.reshape(values.shape[0], *offset.shape[:-1])

    def _dense(self, ask: Request) -> Tensor:
        pos_q, pos_k = ask.where(self.pos)
        # where cells decide, each offset is one number: it does not round by its place in memory
        if pos_q is pos_k is self.pos and pos_q.grid is not None and pos_q.in_place and pos_q.static:
            return TableBias(self.table(pos_q.grid), pos_q).dense(heads=ask.heads)
        if self.spacing is not None:
            pos_q, pos_k = pos_q.spaced(self.spacing), pos_k.spaced(self.spacing)
        offset = pos_k.coords[:, None] - pos_q.coords[:, :, None]
        values = ask.pick(self._of(offset, pos_q.extent[:, None, None])).transpose(0, 1)
        # a function of offset 0 says nothing of tokens without a place
        placed = pos_q.spatial[:, :, None] & pos_k.spatial[:, None]
        return values.masked_fill(~placed[:, None], 0.0)

    def table(self, grid: Grid) -> Tensor:
        """Return its table (h or 1, 2 n_1 - 1, 2 n_2 - 1, ...) on a grid."""
        device = None if self.pos is None else self.pos.coords.device
        spacing = torch.tensor(self.spacing or grid.spacing or (1.0,) * grid.axes, device=device)
        # tables are read at query minus key, functions at key minus query
        lines = [torch.arange(n - 1, -n, -1, dtype=torch.float32, device=device) for n in grid.shape]
        steps = torch.stack(torch.meshgrid(*lines, indexing="ij"), -1) * spacing
        extent = (torch.stack([line[0] for line in lines]) + 1) * spacing  # sizes may be symbols
        return self._of(steps, extent)
