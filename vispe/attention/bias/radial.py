"""Bias given by a function of the distance between two tokens."""

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


class RadialBias(Bias):
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

    __slots__ = ("_key", "depends_on", "function", "rule", "spacing")

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
        depends_on: tuple[Hashable, tuple[Tensor, ...]] | None = None,
    ) -> None:
        super().__init__(pos)
        check_rule(metric, normalize)
        self.function, self.spacing, self._key, self.depends_on = function, spacing, key, depends_on
        self.rule: tuple[Metric, bool, Normalize, Reference] = (metric, wrap, normalize, reference)

    @property
    def invariant(self) -> bool:
        """Whether it depends only on the offset between two tokens."""
        return True

    @property
    def key(self) -> Hashable | None:
        """Cache key of everything but the positions; None for a function with a gradient."""
        return None if self._key is None else ("radial", self._key, self.spacing, *self.rule)

    @property
    def finite(self) -> bool:
        """Whether its table on a grid is known to contain no infinity; False for free coordinates, and with a key."""
        pos = self.pos
        if self._key is not None or pos is None or pos.grid is None or not pos.in_place or not pos.static:
            return False
        with torch.no_grad():
            return readable(pos.coords) and no_infinity(self.table(pos.grid))

    def _of(self, distance: Tensor) -> Tensor:
        """Return the values of the function (h or 1, ...) at distances of any shape."""
        values = self.function(distance.flatten())
        check_floating("RadialBias", values=values)
        if values.ndim != 2 or values.shape[1] != distance.numel():
            raise ShapeError(
                f"RadialBias: function must return (heads or 1, {distance.numel()}) for "
                f"{counted(distance.numel(), 'distance')}, got {tuple(values.shape)}. Add a leading axis for heads."
            )
        return values.reshape(values.shape[0], *distance.shape)

    def _dense(self, request: DenseRequest) -> Tensor:
        pos_q, pos_k = request.where(self.pos)
        # on a regular grid the table gives equal distances bitwise equal values
        if pos_q is pos_k is self.pos and pos_q.grid is not None and pos_q.in_place and pos_q.static:
            return TableBias(self.table(pos_q.grid), pos_q).dense(heads=request.heads)
        scaled_q = pos_q if self.spacing is None else pos_q.with_spacing(self.spacing)
        scaled_k = (
            scaled_q
            if pos_k is pos_q
            else pos_k
            if self.spacing is None
            else pos_k.with_spacing(self.spacing)
        )
        distance = distances(scaled_q, scaled_k, *self.rule)
        values = request.pick(self._of(distance)).transpose(0, 1)
        # tokens without a position have coordinates 0, which must not count as a distance
        both_spatial = pos_q.spatial[:, :, None] & pos_k.spatial[:, None]
        return values.masked_fill(~both_spatial[:, None], 0.0)

    def table(self, grid: Grid) -> Tensor:
        """Return the offset table (h or 1, 2 n_1 - 1, 2 n_2 - 1, ...) on a grid."""
        spaced = grid if self.spacing is None else replace(grid, spacing=self.spacing)
        device = None if self.pos is None else self.pos.coords.device
        # distances of non-negative offsets only: (n_1, n_2, ...)
        quadrant = offsets(spaced, *self.rule, device=device)[tuple(slice(n - 1, None) for n in grid.shape)]
        values = self._of(quadrant)
        # the distance does not depend on the sign of an offset: reflect the quadrant along each axis
        for axis in range(1, values.ndim):
            values = torch.cat([values.narrow(axis, 1, values.shape[axis] - 1).flip(axis), values], axis)
        return values
