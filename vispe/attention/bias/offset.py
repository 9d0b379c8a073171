"""Bias given by a function of the offset (direction and length) between two tokens."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.dense_request import DenseRequest
from vispe.attention.bias.table import TableBias
from vispe.attention.precision import check_floating, no_infinity, readable
from vispe.errors import ShapeError, counted
from vispe.grid import Grid, Positions


class OffsetBias(Bias):
    """``f_h(p_j - p_i)``, and 0 if either token has no position; differentiable with respect to parameters of `f`.

    On a grid `f` is called once per offset, and the fused kernels read the table of its values. If only the distance
    matters, `RadialBias` needs fewer values.

    Args:
        function: maps offsets (m, axes), key minus query, to (h or 1, m).
        pos: the positions it is bound to.
        wrap: whether offsets are periodic with `Positions.extent`, in [-extent / 2, extent / 2).
        spacing: distance between neighbouring cells per axis, overriding that of the positions.
        key: cache key of a `function` without gradient; masks are then cached with the positions.
        depends_on: options and tensors that determine a `function` without `key`; in evaluation, masks are cached while
            both are equal.

    Raises:
        ShapeError: on use, if the function does not return (h or 1, m).

    Example:
        >>> from vispe import Grid
        >>> OffsetBias(lambda step: step.T, Grid((3,)).positions()).dense()[0, 0]
        tensor([[ 0.,  1.,  2.],
                [-1.,  0.,  1.],
                [-2., -1.,  0.]])
    """

    __slots__ = ("_key", "depends_on", "function", "spacing", "wrap")

    def __init__(
        self,
        function: Callable[[Tensor], Tensor],
        pos: Positions | None = None,
        *,
        wrap: bool = False,
        spacing: tuple[float, ...] | None = None,
        key: Hashable | None = None,
        depends_on: tuple[Hashable, tuple[Tensor, ...]] | None = None,
    ) -> None:
        super().__init__(pos)
        self.function, self.wrap, self.spacing, self._key = function, wrap, spacing, key
        self.depends_on = depends_on

    @property
    def invariant(self) -> bool:
        """Whether it depends only on the offset between two tokens."""
        return True

    @property
    def key(self) -> Hashable | None:
        """Cache key of everything but the positions; None for a function with a gradient."""
        return None if self._key is None else ("offset", self._key, self.wrap, self.spacing)

    @property
    def finite(self) -> bool:
        """Whether its table on a grid is known to contain no infinity; False for free coordinates, and with a key."""
        pos = self.pos
        if self._key is not None or pos is None or pos.grid is None or not pos.in_place or not pos.static:
            return False
        with torch.no_grad():
            return readable(pos.coords) and no_infinity(self.table(pos.grid))

    def _of(self, offset: Tensor, extent: Tensor) -> Tensor:
        """Return the values of the function (h or 1, ...) at offsets (..., axes)."""
        if self.wrap:
            offset = (offset + extent / 2).remainder(extent) - extent / 2
        flat = offset.flatten(0, -2)
        values = self.function(flat)
        # not len(steps), which would specialise a symbolic size
        check_floating("OffsetBias", values=values)
        if values.ndim != 2 or values.shape[1] != flat.shape[0]:
            raise ShapeError(
                f"OffsetBias: function must return (heads or 1, {flat.shape[0]}) for "
                f"{counted(flat.shape[0], 'offset')}, got {tuple(values.shape)}. Add a leading axis for heads."
            )
        return values.reshape(values.shape[0], *offset.shape[:-1])

    def _dense(self, request: DenseRequest) -> Tensor:
        pos_q, pos_k = request.where(self.pos)
        # on a regular grid the table gives equal offsets bitwise equal values
        if pos_q is pos_k is self.pos and pos_q.grid is not None and pos_q.in_place and pos_q.static:
            return TableBias(self.table(pos_q.grid), pos_q).dense(heads=request.heads)
        if self.spacing is not None:
            pos_q, pos_k = pos_q.with_spacing(self.spacing), pos_k.with_spacing(self.spacing)
        offset = pos_k.coords[:, None] - pos_q.coords[:, :, None]
        values = request.pick(self._of(offset, pos_q.extent[:, None, None])).transpose(0, 1)
        # tokens without a position have coordinates 0, which must not count as an offset
        both_spatial = pos_q.spatial[:, :, None] & pos_k.spatial[:, None]
        return values.masked_fill(~both_spatial[:, None], 0.0)

    def table(self, grid: Grid) -> Tensor:
        """Return the offset table (h or 1, 2 n_1 - 1, 2 n_2 - 1, ...) on a grid."""
        device = None if self.pos is None else self.pos.coords.device
        spacing = torch.tensor(self.spacing or grid.spacing or (1.0,) * grid.axes, device=device)
        # tables are indexed by query minus key, functions take key minus query
        lines = [torch.arange(n - 1, -n, -1, dtype=torch.float32, device=device) for n in grid.shape]
        steps = torch.stack(torch.meshgrid(*lines, indexing="ij"), -1) * spacing
        extent = (torch.stack([line[0] for line in lines]) + 1) * spacing  # sizes may be symbols
        return self._of(steps, extent)
