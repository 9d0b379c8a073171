"""Distance bank: every token mixes functions of distance from a shared bank (Inkling, as in x-transformers)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.content import ContextBias
from vispe.attention.bias.distance_metrics import distances
from vispe.attention.precision import at_least_float32
from vispe.encodings.base import Biased
from vispe.encodings.parts.layers import PreciseLinear
from vispe.encodings.registry import register
from vispe.errors import OptionError, ShapeError
from vispe.grid import Positions
from vispe.options import PositiveInt, Shape, Spacing


@register
class DistanceBank(Biased):
    """Adds a learned function of distance to the logits, mixed per patch from a small bank.

    bias[h, i, j] = sum_r (W x_i + c)[h, r] * bank[r, d(i, j)], 0 from max_dist on          x-transformers

    d is the distance, rounded to integers.

    Args:
        dim: width of the tokens, d.
        num_heads: heads, h.
        grid: shape of the grid of the model; only the number of its axes is used, by over='offset' (2 without it).
        basis: number of functions in the bank, r, shared by all heads.
        max_dist: number of distances (per axis with over='offset') covered by the bank, from 0 on.
        over: 'distance', or 'offset': a bank over vectors from key to query, (2 max_dist - 1)^axes of them.
        causal: one axis, looking back: d = i - j, and 0 for later keys; as the released language models.
        spacing: distance between neighbouring patches per axis, instead of `Grid.spacing`.

    Shapes: pos (n, axes), x (b, n, d) -> bias (b, h, n, n); prefix rows and columns are 0.
    New resolution: no resampling needed; a step reads the same entry.   Cost: h r (d + 1) + r max_dist parameters per
        layer; the bias is computed densely for every image.
    Invariant to: translation; rotation by any angle and reflection, when patches keep their content; only translation
        with over='offset'.
    Raises: ShapeError without the tokens x, for causal=True on a grid of several axes.
    Differs from the reference: distances and offsets on grids, where the reference has one causal axis (causal=True).

    Example:
        >>> import torch
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("distance_bank", dim=16, num_heads=2)
        >>> encoding.bias(Grid((2, 3)).positions(), 0, torch.ones(1, 6, 16)).dense().shape
        torch.Size([1, 2, 6, 6])
    """

    name = "distance_bank"
    paper = "x-transformers (no paper), https://github.com/lucidrains/x-transformers"
    year = 2025
    ndim = (1, 2, 3)
    encodes = ("distance", "content")
    reads_tokens = True
    invariant = ("translation", "quarter_turns", "reflection", "rotation")
    formula = r"b_{hij} = \sum_r (W x_i + c)_{hr} \, B_{r, d(i, j)}"
    tested_options = ("max_dist=4,basis=3", "over=offset,max_dist=3", "causal=true", "spacing=[2,0.5]")

    dim: PositiveInt
    num_heads: PositiveInt
    grid: Shape | None = None
    basis: PositiveInt = 16
    max_dist: PositiveInt = 32
    over: Literal["distance", "offset"] = "distance"
    causal: bool = False
    spacing: Spacing | None = None

    def __post_init__(self) -> None:
        if self.causal and self.over == "offset":
            raise OptionError(
                "distance_bank: over='offset' has no effect with causal=True, which looks back along one axis. Omit it."
            )
        entries = self.max_dist
        if self.causal:
            self._accept(1)
        if self.over == "offset":
            axes = 2 if self.grid is None else len(self.grid)
            self._accept(axes)
            entries = (2 * self.max_dist - 1) ** axes
        if self.spacing is not None:
            if len(self.spacing) not in self.ndim:
                raise OptionError(
                    f"distance_bank: spacing needs one number per axis ({self.ndim}), got {self.spacing}."
                )
            self._accept(len(self.spacing))
        self.gates = PreciseLinear(self.dim, self.num_heads * self.basis)
        self.distance_bank = nn.Parameter(torch.empty(self.basis, entries))
        self.reset_parameters()

    @property
    def per_layer(self) -> bool:
        """True: every layer has its own a bank."""
        return True

    def reset_parameters(self) -> None:
        """Draw the bank from N(0, 0.02^2) and the gates as torch does: the bias starts near 0."""
        self.gates.reset_parameters()
        nn.init.normal_(self.distance_bank, std=0.02)

    def bias(self, pos: Positions, layer: int, x: Tensor | None = None) -> Bias | None:
        """Return the bias for the tokens `x` (b, n, d)."""
        if self.causal and pos.axes != 1:
            raise ShapeError(f"distance_bank needs 1 axis with causal=True, got {pos.axes} axes ({pos}).")
        self._need_axes(pos)
        if x is None:
            raise ShapeError("distance_bank reads the tokens. Pass x (b, n, d) to bias().")
        spaced = pos if self.spacing is None else pos.with_spacing(self.spacing)
        key = ("distance bank", self.over, self.causal, self.max_dist)
        buckets = spaced.remember(key, lambda: self._buckets(spaced))
        gates = self.gates(x)
        content = gates.reshape(*gates.shape[:2], self.num_heads, self.basis).transpose(1, 2)
        # the last bucket is for distances beyond the bank
        bank = nn.functional.pad(at_least_float32(self.distance_bank), (0, 1)).t()[None]
        return ContextBias(bank, buckets, "query", scaled=False, pos=pos, content=content)

    def _buckets(self, pos: Positions) -> Tensor:
        """Return the index into the bank of each pair, (b or 1, n, n) int64."""
        coords, reach = pos.coords.detach(), self.max_dist
        near = pos.spatial[:, :, None] & pos.spatial[:, None]
        if self.over == "offset":
            steps = (coords[:, :, None] - coords[:, None]).round().long()
            near = near & (steps.abs() < reach).all(-1)
            bucket = torch.zeros_like(steps[..., 0])
            for axis in range(pos.axes):
                bucket = bucket * (2 * reach - 1) + steps[..., axis] + reach - 1
        else:
            away = distances(pos, pos, "euclidean", wrap=False, normalize="none").detach()
            bucket = away.round().long()
            near = near & (bucket < reach)
            if self.causal:
                near = near & (coords[:, :, None, 0] >= coords[:, None, :, 0])
        return bucket.where(near, self.distance_bank.shape[1])
