"""Biases given by a function of the offset (direction and length) or of the distance between two tokens."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace

import torch
from torch import Tensor

from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.dense_request import DenseRequest
from vispe.attention.bias.distance_metrics import Metric, Normalize, Reference, check_rule, distances, offsets
from vispe.attention.bias.table import TableBias
from vispe.attention.precision import check_floating, no_infinity, readable
from vispe.errors import ShapeError, counted
from vispe.grid import Grid, Positions
from vispe.utils.constants import constant

Sources = tuple[Hashable, tuple[Tensor, ...]]


class FunctionBias(Bias):
    """Base class of `OffsetBias` and `RadialBias`.

    Attributes:
        rule: options that determine the argument of the function, in addition to `spacing`.
    """

    __slots__ = ("_key", "depends_on", "function", "rule", "spacing")
    unit: str  # noun for one argument of the function, in messages

    def __init__(
        self,
        function: Callable[[Tensor], Tensor],
        pos: Positions | None,
        rule: Hashable,
        spacing: tuple[float, ...] | None,
        key: Hashable | None,
        depends_on: Sources | None,
    ) -> None:
        super().__init__(pos)
        self.function, self.rule, self.spacing, self._key = function, rule, spacing, key
        self.depends_on = depends_on

    @property
    def invariant(self) -> bool:
        """Whether it depends only on the offset between two tokens."""
        return True

    @property
    def key(self) -> Hashable | None:
        """Cache key of everything but the positions; None for a function with a gradient."""
        return None if self._key is None else (self.unit, self._key, self.spacing, self.rule)

    @property
    def finite(self) -> bool:
        """Whether its table on a grid is known to contain no infinity; False for free coordinates, and with a key."""
        pos = self.pos
        if self._key is not None or pos is None or pos.grid is None or not pos.on_grid or not pos.static:
            return False
        with torch.no_grad():
            return readable(pos.coords) and no_infinity(self.table(pos.grid))

    def _values(self, arguments: Tensor, shape: torch.Size) -> Tensor:
        """Return the values (h or 1, *shape) of the function for arguments (m, ...)."""
        values, name = self.function(arguments), type(self).__name__
        check_floating(name, values=values)
        # not len(arguments), which would specialise a symbolic size
        if values.ndim != 2 or values.shape[1] != arguments.shape[0]:
            raise ShapeError(
                f"{name}: function must return (heads or 1, {arguments.shape[0]}) for "
                f"{counted(arguments.shape[0], self.unit)}, got {tuple(values.shape)}. Add a leading axis for heads."
            )
        return values.reshape(values.shape[0], *shape)

    def _between(self, pos_q: Positions, pos_k: Positions) -> Tensor:
        """Return the values of all pairs, (h or 1, b or 1, n, m)."""
        raise NotImplementedError

    def _dense(self, request: DenseRequest) -> Tensor:
        pos_q, pos_k = request.positions(self.pos)
        # on a regular grid the table gives equal offsets bitwise equal values
        if pos_q is pos_k is self.pos and pos_q.grid is not None and pos_q.on_grid and pos_q.static:
            return TableBias(self.table(pos_q.grid), pos_q).dense(heads=request.heads)
        spaced = (p if self.spacing is None else p.with_spacing(self.spacing) for p in (pos_q, pos_k))
        values = request.pick(self._between(*spaced)).transpose(0, 1)
        # tokens without a position have coordinates 0, which must not count as an offset
        both_spatial = pos_q.spatial[:, :, None] & pos_k.spatial[:, None]
        return values.masked_fill(~both_spatial[:, None], 0.0)


class OffsetBias(FunctionBias):
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

    __slots__ = ("wrap",)
    unit = "offset"

    def __init__(
        self,
        function: Callable[[Tensor], Tensor],
        pos: Positions | None = None,
        *,
        wrap: bool = False,
        spacing: tuple[float, ...] | None = None,
        key: Hashable | None = None,
        depends_on: Sources | None = None,
    ) -> None:
        super().__init__(function, pos, wrap, spacing, key, depends_on)
        self.wrap = wrap

    def _of(self, offset: Tensor, extent: Tensor) -> Tensor:
        """Return the values of the function (h or 1, ...) at offsets (..., axes)."""
        if self.wrap:
            offset = (offset + extent / 2).remainder(extent) - extent / 2
        return self._values(offset.flatten(0, -2), offset.shape[:-1])

    def _between(self, pos_q: Positions, pos_k: Positions) -> Tensor:
        return self._of(pos_k.coords[:, None] - pos_q.coords[:, :, None], pos_q.extent[:, None, None])

    def table(self, grid: Grid) -> Tensor:
        """Return the offset table (h or 1, 2 n_1 - 1, 2 n_2 - 1, ...) on a grid."""
        device = None if self.pos is None else self.pos.coords.device
        spacing = constant(
            self.spacing or grid.spacing or (1.0,) * grid.axes, torch.get_default_dtype(), device
        )
        # tables are indexed by query minus key, functions take key minus query
        lines = [torch.arange(n - 1, -n, -1, dtype=torch.float32, device=device) for n in grid.shape]
        steps = torch.stack(torch.meshgrid(*lines, indexing="ij"), -1) * spacing
        extent = (torch.stack([line[0] for line in lines]) + 1) * spacing  # sizes may be symbols
        return self._of(steps, extent)


class RadialBias(FunctionBias):
    """``f_h(distance(p_i, p_j))``, and 0 if either token has no position; differentiable in the parameters of `f`.

    On a grid `f` is called with one distance per cell, and its values are reflected into the table of all offsets,
    which the fused kernels and dense masks use.

    Args:
        function: maps distances (m,) to (h or 1, m).
        pos: the positions it is bound to.
        metric: 'euclidean', 'manhattan', 'chebyshev' or 'squared' (euclidean, squared).
        wrap: whether distances are periodic with `Positions.extent`.
        normalize: 'max', 'reference' or 'none', as in `DistanceBias`.
        reference: grid shape for 'reference'; `Grid.reference` by default.
        spacing: distance between neighbouring cells per axis, overriding that of the positions.
        key: cache key of a `function` without gradient; masks are then cached with the positions.
        depends_on: options and tensors that determine a `function` without `key`; in evaluation, masks are cached while
            both are equal.

    Raises:
        OptionError: `metric` or `normalize` is unknown.
        ShapeError: on use, if the function does not return (h or 1, m).

    Example:
        >>> import torch
        >>> from vispe import Grid
        >>> RadialBias(lambda d: -torch.log1p(d)[None], Grid((1, 3)).positions()).dense()[0, 0, 0].exp()
        tensor([1.0000, 0.5000, 0.3333])
    """

    __slots__ = ("metric_rule",)
    unit = "distance"

    def __init__(
        self,
        function: Callable[[Tensor], Tensor],
        pos: Positions | None = None,
        *,
        metric: Metric = "euclidean",
        wrap: bool = False,
        normalize: Normalize = "none",
        reference: Reference = None,
        spacing: tuple[float, ...] | None = None,
        key: Hashable | None = None,
        depends_on: Sources | None = None,
    ) -> None:
        check_rule(metric, normalize)
        self.metric_rule: tuple[Metric, bool, Normalize, Reference] = (metric, wrap, normalize, reference)
        super().__init__(function, pos, self.metric_rule, spacing, key, depends_on)

    def _of(self, distance: Tensor) -> Tensor:
        """Return the values of the function (h or 1, ...) at distances of any shape."""
        return self._values(distance.flatten(), distance.shape)

    def _between(self, pos_q: Positions, pos_k: Positions) -> Tensor:
        return self._of(distances(pos_q, pos_k, *self.metric_rule))

    def table(self, grid: Grid) -> Tensor:
        """Return the offset table (h or 1, 2 n_1 - 1, 2 n_2 - 1, ...) on a grid."""
        spaced = grid if self.spacing is None else replace(grid, spacing=self.spacing)
        device = None if self.pos is None else self.pos.coords.device
        # distances of non-negative offsets only: (n_1, n_2, ...)
        quadrant = offsets(spaced, *self.metric_rule, device=device)[
            tuple(slice(n - 1, None) for n in grid.shape)
        ]
        values = self._of(quadrant)
        # the distance does not depend on the sign of an offset: reflect the quadrant along each axis
        for axis in range(1, values.ndim):
            values = torch.cat([values.narrow(axis, 1, values.shape[axis] - 1).flip(axis), values], axis)
        return values
