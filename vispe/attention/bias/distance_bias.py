"""Bias proportional to the distance of two tokens (ALiBi and relatives)."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import replace

import torch
from torch import Tensor

from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.dense_request import DenseRequest
from vispe.attention.bias.distance_metrics import (
    Metric,
    Normalize,
    Reference,
    check_rule,
    distances,
    largest,
    offsets,
)
from vispe.attention.precision import check_floating, no_infinity
from vispe.attention.score_terms import ScoreTerm, distance_term
from vispe.errors import ShapeError
from vispe.grid import Grid, Positions
from vispe.utils.constants import constant


class DistanceBias(Bias):
    """``-slope[h] * distance(p_i, p_j)`` (2D ALiBi and relatives).

    Args:
        slopes: one number per head; a tuple of floats (fixed, so that masks are cached) or a tensor (h,).
        pos: the positions it is bound to.
        metric: 'euclidean', 'manhattan', 'chebyshev' or 'squared' (euclidean, squared).
        wrap: whether distances are periodic with `Positions.extent`.
        normalize: 'max' divides by the largest distance of the grid, 'reference' by that of the reference grid,
            'none' keeps the units of `Grid.spacing`.
        reference: grid shape for 'reference'; `Grid.reference` by default.
        spacing: distance between neighbouring cells per axis, overriding that of the positions.

    Raises:
        OptionError: `metric` or `normalize` is unknown.
        ShapeError: `slopes` is not one number per head.

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
            raise ShapeError(
                f"DistanceBias needs one slope per head, a tuple or a tensor (h,), got {slopes!r}."
            )
        check_floating("DistanceBias", slopes=slopes if isinstance(slopes, Tensor) else None)
        self.slopes, self.wrap, self.reference, self.spacing = slopes, wrap, reference, spacing
        self.metric: Metric = metric
        self.normalize: Normalize = normalize

    def in_spacing(self, pos: Positions) -> Positions:
        """Return the positions in units of `spacing`."""
        return pos if self.spacing is None else pos.with_spacing(self.spacing)

    @property
    def rule(self) -> tuple[Metric, bool, Normalize, Reference]:
        """The options of the distance: metric, wrap, normalize, reference."""
        return self.metric, self.wrap, self.normalize, self.reference

    @property
    def invariant(self) -> bool:
        """Whether it depends only on the offset between two tokens."""
        return True

    @property
    def key(self) -> Hashable | None:
        """Cache key of everything but the positions; None for learned slopes."""
        return None if isinstance(self.slopes, Tensor) else (self.slopes, self.spacing, *self.rule)

    @property
    def per_head(self) -> bool:
        """Whether heads differ."""
        return isinstance(self.slopes, Tensor) or any(s != self.slopes[0] for s in self.slopes)

    @property
    def finite(self) -> bool:
        """Whether it is known to contain no infinity."""
        if isinstance(self.slopes, Tensor):
            return no_infinity(self.slopes)
        return all(-math.inf < s < math.inf for s in self.slopes)  # floats may be symbols

    def slope(self, like: Tensor) -> Tensor:
        """Return the slopes (h,) in the dtype of `like` or better, or (1,) if all heads share one."""
        if isinstance(self.slopes, Tensor):
            return self.slopes.to(torch.promote_types(self.slopes.dtype, like.dtype))
        # one number if all heads share it, so that the bias has one head
        return constant(self.slopes if self.per_head else self.slopes[:1], like.dtype, like.device)

    def coords(self, pos: Positions) -> tuple[Tensor, Tensor | None]:
        """Return coordinates whose distance is that of the bias, for functions of one pair of tokens.

        Returns:
            Flags of tokens with a position (1.0, else 0.0) and their coordinates, (b or 1, 1 + axes, n) float32; and
            periods (b or 1, axes) float32, None without `wrap`.
        """
        pos = self.in_spacing(pos)
        coords, extent, no_position = pos.coords.double(), pos.extent.double(), ~pos.spatial[..., None]
        if self.wrap:
            coords = coords.remainder(extent[:, None])
        else:  # a common offset would cost precision in float32
            coords = coords - coords.masked_fill(no_position, float("inf")).amin(1, keepdim=True)
        divisor = largest(pos.extent, pos.cell, pos.grid, *self.rule)
        if divisor is not None:
            # squared distances are divided by the unit twice
            unit = divisor.double().sqrt() if self.metric == "squared" else divisor.double()
            coords, extent = coords / unit[:, None, None], extent / unit[:, None]
        coords = coords.masked_fill(no_position, 0.0)
        has_position = pos.spatial[..., None].expand(coords.shape[0], -1, 1).to(coords.dtype)
        flags_and_coords = torch.cat([has_position, coords], -1).transpose(1, 2).float().contiguous()
        return flags_and_coords, extent.float().contiguous() if self.wrap else None

    def _score_terms(self) -> list[ScoreTerm]:
        pos = self._bound("score_mod")
        return [distance_term(self.slope(pos.coords), *self.coords(pos), self.metric)]

    def _dense(self, request: DenseRequest) -> Tensor:
        pos_q, pos_k = (self.in_spacing(p) for p in request.positions(self.pos))
        # cached with the positions: all layers share one distance matrix (b or 1, n, n)
        if request.cacheable and pos_k is pos_q:
            distance = pos_q.remember(("distance", *self.rule), lambda: distances(pos_q, pos_q, *self.rule))
        else:
            distance = distances(pos_q, pos_k, *self.rule)
        return distance[:, None] * -request.pick(self.slope(distance))[:, None, None]

    def table(self, grid: Grid) -> Tensor:
        """Return the offset table (h or 1, 2 n_1 - 1, 2 n_2 - 1, ...) on a grid."""
        reference = (
            self.slopes if isinstance(self.slopes, Tensor) else None if self.pos is None else self.pos.coords
        )
        # offsets in units of `spacing`
        spaced = grid if self.spacing is None else replace(grid, spacing=self.spacing)
        distance = offsets(spaced, *self.rule, device=None if reference is None else reference.device)
        return distance[None] * -self.slope(distance).reshape(-1, *[1] * grid.axes)
