"""A bias that falls with the distance of two tokens."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import replace

import torch
from torch import Tensor

from vispe.attention.bias.abstract_bias import Bias, Request
from vispe.attention.bias.distance_metrics import Metric, Normalize, Reference, check_rule, distances, offsets
from vispe.attention.precision import no_infinity
from vispe.errors import ShapeError
from vispe.grid import Grid, Positions


class DistanceBias(Bias):
    """``-slope[h] * distance(p_i, p_j)`` (2D ALiBi and relatives).

    Args:
        slopes: one number per head; a tuple of floats (then nothing has a gradient and masks are kept) or a
            tensor (h,).
        pos: the positions it is bound to.
        metric: 'euclidean', 'manhattan', 'chebyshev' or 'squared' (euclidean, squared).
        wrap: distances on the torus of `Positions.extent`.
        normalize: 'max' divides by the largest distance of the grid, 'reference' by that of the reference grid,
            'none' leaves units of `Grid.spacing`.
        reference: grid shape for 'reference'; `Grid.reference` by default.
        spacing: distance between neighbouring cells per axis, in place of that of the positions.

    Raises:
        OptionError: there is no such metric or normalisation.
        ShapeError: slopes are not one number per head.

    Example:
        >>> from vispe import Grid
        >>> DistanceBias((0.5,), Grid((1, 3)).positions()).dense()[0, 0]
        tensor([[-0.0000, -0.5000, -1.0000],
                [-0.5000, -0.0000, -0.5000],
                [-1.0000, -0.5000, -0.0000]])
    """

    __slots__ = ("metric", "normalize", "reference", "slopes", "spacing", "wrap")

    def __init__(
        self,
        slopes: tuple[float, ...] | Tensor,
        pos: Positions | None = None,
        *,
        metric: Metric = "euclidean",
        wrap: bool = False,
        normalize: Normalize = "none",
        reference: Reference = None,
        spacing: tuple[float, ...] | None = None,
    ) -> None:
        super().__init__(pos)
        check_rule(metric, normalize)
        if slopes.ndim != 1 if isinstance(slopes, Tensor) else not slopes:
            raise ShapeError(f"DistanceBias needs one slope per head, got {slopes!r}.")
        self.slopes, self.wrap, self.reference, self.spacing = slopes, wrap, reference, spacing
        self.metric: Metric = metric
        self.normalize: Normalize = normalize

    def placed(self, pos: Positions) -> Positions:
        """Return the positions in units of `spacing`."""
        return pos if self.spacing is None else pos.spaced(self.spacing)

    @property
    def rule(self) -> tuple[Metric, bool, Normalize, Reference]:
        """What the distance depends on beside the positions."""
        return self.metric, self.wrap, self.normalize, self.reference

    @property
    def invariant(self) -> bool:
        """Whether it depends on nothing but the offset between two tokens."""
        return True

    @property
    def key(self) -> Hashable | None:
        """What it depends on beside its positions; None where that has a gradient."""
        return None if isinstance(self.slopes, Tensor) else (self.slopes, self.spacing, *self.rule)

    @property
    def per_head(self) -> bool:
        """Whether heads differ."""
        return isinstance(self.slopes, Tensor) or any(s != self.slopes[0] for s in self.slopes)

    @property
    def finite(self) -> bool:
        """Whether it is known to hold no infinity."""
        if isinstance(self.slopes, Tensor):
            return no_infinity(self.slopes)
        return all(-math.inf < s < math.inf for s in self.slopes)  # floats may be symbols

    def slope(self, like: Tensor) -> Tensor:
        """Return the slopes (h,), in the dtype of `like` or better, or (1,) when all heads share one."""
        if isinstance(self.slopes, Tensor):
            return self.slopes.to(torch.promote_types(self.slopes.dtype, like.dtype))
        return like.new_tensor(self.slopes if self.per_head else self.slopes[:1])

    def _dense(self, ask: Request) -> Tensor:
        pos_q, pos_k = (self.placed(p) for p in ask.where(self.pos))
        if ask.keep and pos_k is pos_q:  # the layers share one distance matrix
            distance = pos_q.remember(("distance", *self.rule), lambda: distances(pos_q, pos_q, *self.rule))
        else:
            distance = distances(pos_q, pos_k, *self.rule)
        return distance[:, None] * -ask.pick(self.slope(distance))[:, None, None]

    def table(self, grid: Grid) -> Tensor:
        """Return its table (h or 1, 2 n_1 - 1, 2 n_2 - 1, ...) on a grid."""
        own = (
            self.slopes if isinstance(self.slopes, Tensor) else None if self.pos is None else self.pos.coords
        )
        spaced = grid if self.spacing is None else replace(grid, spacing=self.spacing)
        distance = offsets(spaced, *self.rule, device=None if own is None else own.device)
        return distance[None] * -self.slope(distance).reshape(-1, *[1] * grid.axes)
