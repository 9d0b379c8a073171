"""FIRE: a small network of the distance relative to the largest distance (arXiv 2310.04418)."""

from __future__ import annotations

from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.dense import DenseBias
from vispe.attention.bias.distance_metrics import distances, largest
from vispe.attention.precision import at_least_float32
from vispe.encodings.parts.bias.radial import RadialEncoding
from vispe.encodings.parts.layers import PreciseLinear
from vispe.encodings.registry import register
from vispe.errors import OptionError
from vispe.grid import Grid, Positions
from vispe.utils.axes import last_axis_to
from vispe.utils.constants import constant
from vispe.utils.options import NonNegativeFloat, PositiveFloat, PositiveInt, Shape


@register
class Fire(RadialEncoding):
    """A small network maps the distance, as a fraction of the largest one, to a bias per head.

    bias[h] = W2 relu(W1 r + b1) + b2, r = psi(d) / (psi(max(L, D)) + eps), psi(x) = ln(1 + |c x|)     arXiv 2310.04418

    D is the largest distance of the grid, so r spans 0 to 1 at every resolution; below L it is replaced by L, so that
    small crops keep the scale of patches. W2 starts small and b2 at 0: a pretrained model is nearly unchanged at first.
    The kinks of the hidden units are spread evenly over r. ``fire.causal`` is the form of the paper.

    Args:
        num_heads: heads, h.
        grid: shape of the token grid at the training resolution, supplied by the host, for `threshold`.
        hidden: width of the hidden layer.
        threshold: L, in units of the spacing; by default half the largest distance of `grid`, 0 (only D
            counts) if that is unknown, and 512 with `causal`.
        init_c: initial value of c.
        causal: the original for causal sequences: D is the position of the query, and L has a learned factor. 1 axis.
        eps: added to the divisor.
        metric: 'euclidean', 'manhattan', 'chebyshev' or 'squared' (euclidean, squared), in units of the spacing.
        wrap: distances on the torus: per axis min(d, n - d).
        spacing: distance between neighbouring patches per axis, instead of `Grid.spacing`.

    Shapes: pos (n, axes) -> bias (1, h, n, n); prefix rows and columns are 0.
    New resolution: no resampling needed; the bias scales with the grid, above L.
    Cost: hidden (h + 2) + h + 1 parameters per layer; the network runs once per distance, O(1) per score. With `causal`
        it runs for every pair of tokens.
    Invariant to: translation, rotation by 90 degrees and flips; by any angle while the largest distance is the same.
        Not with `causal`.
    Raises: ShapeError if `pos` has other axes; OptionError for incompatible options.
    Differs from the reference: D of grids, with L fixed, since the same D of all queries is either above or below it;
        the initialisation of the network.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("fire", num_heads=2, grid=(4, 4))
        >>> encoding.bias(Grid((2, 3)).positions(), 0).dense().shape
        torch.Size([1, 2, 6, 6])
    """

    name = "fire"
    paper = "Functional Interpolation for Relative Positions, https://arxiv.org/abs/2310.04418"
    year = 2023
    presets: ClassVar[dict[str, dict[str, Any]]] = {"causal": {"causal": True}}
    encodes = ("distance",)
    invariant = ("translation", "quarter_turns", "reflection", "rotation")
    formula = (
        r"b_h = W_2 \operatorname{relu}(W_1 r + b_1) + b_2, \quad r = \frac{\psi(d)}{\psi(\max(L, D)) + "
        r"\varepsilon}, \quad \psi(x) = \ln(1 + |c x|)"
    )
    tested_options = (
        "metric=manhattan,hidden=5,spacing=[2,0.5]",
        "threshold=0,wrap=true",
        "causal=true,threshold=2",
    )
    normalize: ClassVar[Any] = "none"
    reference: ClassVar[Any] = None

    num_heads: PositiveInt
    grid: Shape | None = None
    hidden: PositiveInt = 32
    threshold: NonNegativeFloat | None = None
    init_c: PositiveFloat = 0.1
    causal: bool = False
    eps: PositiveFloat = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.causal and (self.metric != "euclidean" or self.wrap or self.spacing is not None):
            raise OptionError(
                "metric, wrap and spacing have no effect with causal=True, which counts steps back along one axis. "
                "Omit them."
            )
        if self.causal:
            self._accept(1)
        self.length = self._length()
        self.mlp = nn.Sequential(
            PreciseLinear(1, self.hidden), nn.ReLU(), PreciseLinear(self.hidden, self.num_heads)
        )
        self.c = nn.Parameter(torch.empty(()))
        self.L_multiplier = nn.Parameter(torch.empty(())) if self.causal else None
        self.reset_parameters()

    def _length(self) -> float:
        """Return the threshold according to the options."""
        if self.threshold is not None or self.causal:
            return 512.0 if self.threshold is None else self.threshold
        if self.grid is None:
            return 0.0
        # on the CPU, because the model may be built on the meta device
        pos = Grid(self.grid, spacing=self.spacing).positions("cpu")
        return float(self._reach(pos)) / 2

    def _reach(self, pos: Positions) -> Tensor:
        """Return the largest distance of the field (b or 1)."""
        return cast("Tensor", largest(pos.extent, pos.cell, pos.grid, self.metric, self.wrap, "max", None))

    @property
    def per_layer(self) -> bool:
        """True: every layer has its own a network."""
        return True

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Spread the kinks of the hidden units over [0, 1]; draw the output weights with standard deviation 0.02."""
        weight, bias = self.mlp.get_parameter("0.weight"), self.mlp.get_parameter("0.bias")
        # each unit is inactive at distance 0 and active at the largest, so that all units learn
        nn.init.uniform_(weight, 0.5, 1.5)
        hinge = torch.arange(self.hidden, device=weight.device, dtype=weight.dtype) / self.hidden
        bias.copy_(-weight[:, 0] * hinge)
        nn.init.normal_(self.mlp.get_parameter("2.weight"), std=0.02)
        nn.init.zeros_(self.mlp.get_parameter("2.bias"))
        nn.init.constant_(self.c, self.init_c)
        if self.L_multiplier is not None:
            nn.init.ones_(self.L_multiplier)

    def bias(self, pos: Positions, layer: int, x: Tensor | None = None) -> Bias | None:
        """Return the bias, the same for every block that has this network."""
        self._need_axes(pos)
        valid = pos.spatial[:, :, None] & pos.spatial[:, None]
        if self.causal:
            coord = pos.coords[..., 0]
            # causal: the largest distance of a query is its position
            distance, reach = (coord[:, :, None] - coord[:, None]).abs(), coord[..., None].abs()
            return DenseBias(self._values(distance, reach).masked_fill(~valid[:, None], 0.0), pos)
        spaced = pos if self.spacing is None else pos.with_spacing(self.spacing)
        reach = self._reach(spaced)
        # one field size for all samples: the bias is a function of the distance
        if len(reach) == 1:
            return self._radial(lambda d: self._values(d[None], reach[:, None])[0], pos)
        # samples of several sizes: fractions of different distances
        distance = distances(spaced, spaced, self.metric, self.wrap, "none")
        values = self._values(distance, reach[:, None, None])
        return DenseBias(values.masked_fill(~valid[:, None], 0.0), pos)

    def _values(self, distance: Tensor, reach: Tensor) -> Tensor:
        """Return the bias (b, h, ...) of distances (b, ...) up to `reach`."""
        c = at_least_float32(self.c)[None]  # with an axis, so that float64 takes part in type promotion
        length = constant((float(self.length),), reach.dtype, reach.device)[0]
        if self.L_multiplier is not None:
            length = (at_least_float32(self.L_multiplier)[None] * length).abs()
        # a distance of 0 gives a fraction of 0
        fraction = (c * distance).abs().log1p() / (
            (c * torch.maximum(length, reach)).abs().log1p() + self.eps
        )
        return last_axis_to(self.mlp(fraction[..., None]), 1)
