"""Fixed sines and cosines of three coordinates, for volumes and videos (after arXiv 2205.09113 and V-JEPA)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from vispe.attention.precision import at_least_float32
from vispe.encodings.base import Additive
from vispe.encodings.registry import register
from vispe.errors import OptionError, ShapeError
from vispe.grid import Positions, as_spacing


@register
class SinCos3D(Additive):
    """Adds fixed sines and cosines of depth (or time), row and column to the tokens.

    [sin(z w_k), cos(z w_k), sin(y w_k), cos(y w_k), sin(x w_k), cos(x w_k)], w_k = temperature ** (-k / K),
    k = 0 .. K - 1, where K is the number of frequencies of the axis: its share of the d / 2 of all axes.

    Args:
        dim: width of the tokens, d; even.
        temperature: ratio of the longest to the shortest wavelength; the shortest is 2 pi units of the spacing.
        split: shares of the three axes in the width, (1, 1, 1) for equal parts. What does not divide goes to the
            largest remainders, earlier axes first, so widths such as 1024 need no padding. V-JEPA's
            other layout, half of the width for time, is (2, 1, 1).
        spacing: distance between neighbouring patches per axis (d, h, w) or (t, h, w), in place of `Grid.spacing`.
        std: rescale the values of the whole table to this standard deviation (that of the learned table it
            replaces, say); None keeps them in [-1, 1].

    Shapes: pos.coords (1 or b, n, 3) -> (1 or b, n, d) float32; prefix tokens get 0.
    New resolution: coordinates go on, in units of the spacing.   Cost: no parameters, O(n d) per forward.
    Invariant to: nothing; the value at a coordinate does not depend on the rest of the grid (std=None).
    Raises: ShapeError if `pos` is not 3-axis.
    Differs from the reference: a width that 6 does not divide is shared out in whole frequencies (V-JEPA makes
        a wider table and cuts it, which leaves the last frequencies without their cosine).
    """

    name = "sincos3d"
    paper = "Masked Autoencoders As Spatiotemporal Learners, https://arxiv.org/abs/2205.09113"
    year = 2022
    ndim = (3,)

    def __init__(
        self,
        *,
        dim: int,
        temperature: float = 10000.0,
        split: Sequence[float] = (1, 1, 1),
        spacing: Sequence[float] | None = None,
        std: float | None = None,
    ) -> None:
        super().__init__()
        if dim % 2 or dim < 6:
            raise OptionError(f"sincos3d needs an even width of 6 or more, got dim={dim}.")
        if not 0 < temperature < float("inf") or not (std is None or 0 < std < float("inf")):
            raise OptionError(f"sincos3d needs positive numbers, got temperature={temperature}, std={std}.")
        self.dim, self.temperature, self.std = dim, temperature, std
        self.split = _shares(split)
        self.spacing = None if spacing is None else as_spacing(spacing, 3)

    def counts(self) -> tuple[int, ...]:
        """Return the number of frequencies of each axis; they sum to half of the width."""
        half, total = self.dim // 2, sum(self.split)
        exact = [half * share / total for share in self.split]
        counts = [int(e + 1e-9) for e in exact]
        by_rest = sorted(range(3), key=lambda i: (round(counts[i] - exact[i], 9), i))
        for i in by_rest[: half - sum(counts)]:
            counts[i] += 1
        return tuple(counts)

    def table(self, pos: Positions, image: Tensor | None = None) -> Tensor:
        """Return the table, (1 or b, n, d) float32, 0 for prefix tokens."""
        if pos.axes != 3:
            raise ShapeError(f"sincos3d needs 3 axes, got {pos.axes} ({pos}).")
        key = (self.name, self.dim, self.temperature, self.split, self.spacing, self.std)
        return pos.remember(key, lambda: self._table(pos))

    def _table(self, pos: Positions) -> Tensor:
        table = self._waves(pos)
        if self.std is None:
            return table
        whole = pos  # the scale is that of the whole grid, also when tokens are dropped
        if pos.grid is not None and pos.index is not None:
            whole = pos.grid.positions(pos.coords.device)
        waves = table if whole is pos else self._waves(whole)
        placed = whole.spatial[..., None].expand_as(waves)
        count = placed.sum((1, 2), keepdim=True)
        mean = waves.sum((1, 2), keepdim=True) / count
        spread = (((waves - mean) * placed).square().sum((1, 2), keepdim=True) / (count - 1)).sqrt()
        return table / spread * self.std

    def _waves(self, pos: Positions) -> Tensor:
        coords = at_least_float32(pos.coords if self.spacing is None else pos.spaced(self.spacing).coords)
        # exact powers; devices without float64 take them from the CPU
        place = "cpu" if coords.device.type == "mps" else coords.device
        parts: list[Tensor] = []
        for axis, count in enumerate(self.counts()):
            powers = torch.arange(count, dtype=torch.float64, device=place) / max(count, 1)
            angle = coords[..., axis, None] * (self.temperature**-powers).to(coords)
            parts += [angle.sin(), angle.cos()]
        return torch.cat(parts, -1) * pos.spatial[..., None]


def _shares(split: object) -> tuple[float, ...]:
    given = tuple(cast("Sequence[object]", split)) if isinstance(split, list | tuple) else ()
    shares = [s for s in given if not isinstance(s, bool) and isinstance(s, int | float)]
    if len(given) != 3 or len(shares) != 3 or any(not 0 < s < float("inf") for s in shares):
        raise OptionError(f"split needs a positive share for each of 3 axes, got split={split!r}.")
    return tuple(shares)
