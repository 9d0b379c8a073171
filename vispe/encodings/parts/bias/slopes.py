"""Base of `alibi`, `alibi2d` and `alibi3d`: slopes per head, and the distance bias computed from them."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.dense import DenseBias, SumBias
from vispe.attention.bias.distance_bias import DistanceBias
from vispe.attention.bias.distance_metrics import Metric, Normalize
from vispe.encodings.base import Biased
from vispe.encodings.parts.bias.radial import inverse_softplus
from vispe.encodings.parts.resample import training_grid
from vispe.errors import OptionError, ShapeError, counted
from vispe.grid import PerToken, Positions
from vispe.utils.options import Integer, NonNegativeFloat, PositiveFloat, PositiveInt, check_per_axis

Slopes = Literal["constant", "geometric", "alibi", "harmonic", "radius", "learned"]
# m r within which exp(-m d) has 95 % of its weight, by axes: the quantile of a gamma distribution of that shape
REACH = {1: 3.00, 2: 4.74, 3: 6.30}


def fixed_slopes(rule: Slopes, heads: int) -> tuple[float, ...]:
    """Return the slopes of a fixed rule, one per head.

    'constant': 1. 'geometric': ``2 ** (-8 k / h)``, k = 1 .. h, for any h (arXiv 2603.16840). 'alibi': the same for
    powers of two; otherwise those of the next lower power p, then the first h - p of every second slope of
    the 2p-head rule (arXiv 2108.12409). 'harmonic': ``1 / k``, k = 1 .. h.
    """
    if rule == "harmonic":
        return tuple(1.0 / k for k in range(1, heads + 1))
    if rule == "constant":
        return (1.0,) * heads
    if rule == "geometric" or heads & (heads - 1) == 0:
        # from 2^(-8 / h) to 2^-8
        return tuple(2.0 ** (-8.0 * k / heads) for k in range(1, heads + 1))
    # not a power of two: slopes of the largest power below, then every second one of the next power
    lower = 1 << (heads.bit_length() - 1)
    return fixed_slopes("alibi", lower) + fixed_slopes("alibi", 2 * lower)[::2][: heads - lower]


def radius_slopes(radius: tuple[float, ...], heads: int, axes: int) -> tuple[float, ...]:
    """Return the slopes for which the bias alone puts 95 % of the attention weight within each head's radius.

    Args:
        radius: one per head, or the first and the last, with geometric spacing between them.
        heads: heads.
        axes: axes of the grid, 1 to 3: ``REACH / radius`` with 3.00, 4.74 or 6.30.

    Raises:
        OptionError: the number of radii is neither 2 nor `heads`.
    """
    if len(radius) == 2 < heads:
        low, high = radius
        # log-spaced from low to high
        radius = tuple(low * (high / low) ** (k / (heads - 1)) for k in range(heads))
    if len(radius) != heads:
        raise OptionError(
            "radius needs two numbers, for the first and the last head, or one for each of "
            f"{counted(heads, 'head')}, got {list(radius)}."
        )
    # REACH is the product of slope and radius
    return tuple(REACH[axes] / r for r in radius)


class AlibiBase(Biased):
    """Bias that decreases linearly with distance: options for slopes and layers."""

    fused = True

    num_heads: PositiveInt
    depth: PositiveInt | None = None
    slopes: Slopes = "alibi"
    softplus: bool = False
    layers: tuple[Integer, ...] | None = None
    biased_heads: PositiveInt | None = None
    steepest: PositiveFloat | None = None
    radius: tuple[PositiveFloat, ...] | None = None
    factor: PositiveFloat = 1.0

    def __post_init__(self) -> None:
        if self.softplus and self.slopes != "learned":
            raise OptionError(f"softplus=true has no effect with slopes={self.slopes!r}. Use slopes=learned.")
        # without `depth`, every index is accepted
        outside = [i for i in self.layers or () if i < 0 or i >= (self.depth or i + 1)]
        if outside:
            raise OptionError(f"layers must be block indices below depth={self.depth}, got {outside}.")
        biased = self.biased_heads or self.num_heads
        if biased > self.num_heads:
            raise OptionError(
                f"biased_heads must be between 1 and num_heads={self.num_heads}, got {self.biased_heads}."
            )
        self._check_rule(biased)
        if self.slopes == "learned":
            self.slope = nn.Parameter(torch.empty(biased))
            self.reset_parameters()

    def _check_rule(self, heads: int) -> None:
        """Check the options that only some rules of slopes use."""
        if self.steepest is not None and self.slopes != "harmonic":
            raise OptionError(
                f"steepest={self.steepest:g} has no effect with slopes={self.slopes!r}. Use slopes=harmonic."
            )
        if self.radius is not None and self.slopes != "radius":
            raise OptionError(
                f"radius={list(self.radius)} has no effect with slopes={self.slopes!r}. Use slopes=radius."
            )
        if self.factor != 1.0 and self.slopes in ("harmonic", "radius", "learned"):
            alternative = {"harmonic": "steepest", "radius": "radius"}.get(self.slopes)
            hint = f"Use {alternative} instead" if alternative else "Learned slopes need no factor"
            raise OptionError(f"factor={self.factor:g} has no effect with slopes={self.slopes!r}. {hint}.")
        if self.slopes == "radius":
            if self.radius is None:
                raise OptionError(
                    "slopes=radius needs the radius of the first and last head, got None. Use radius=[first,last]."
                )
            radius_slopes(self.radius, heads, self.ndim[0])

    @property
    def per_layer(self) -> bool:
        """Whether slopes are learned, one per head and layer."""
        return self.slopes == "learned"

    def reset_parameters(self) -> None:
        """Draw learned slopes uniformly from [0, 1) (of the slope itself, also with softplus)."""
        if self.slopes == "learned":
            with torch.no_grad():
                self.slope.uniform_(0.0, 1.0)
                if self.softplus:  # invert, so that softplus(slope) equals the drawn value
                    # the inverse softplus of 0 is -infinity
                    self.slope.copy_(inverse_softplus(self.slope.clamp(min=1e-4)))

    def active(self, layer: int) -> bool:
        """Whether block `layer` has the bias."""
        return self.layers is None or layer in self.layers

    def rename_checkpoint_keys(self, state_dict: dict[str, Any], parent_prefix: str, prefix: str) -> None:
        """Rename learned slopes, stored in released checkpoints as `m` (h, 1, 1) of the attention layer."""
        if self.slopes == "learned" and f"{parent_prefix}m" in state_dict:
            slope = state_dict.pop(f"{parent_prefix}m").flatten()
            if self.softplus and not (slope > 0).all():
                raise OptionError(
                    f"softplus=true needs positive slopes, got slopes down to {slope.min():.3g} in {parent_prefix}m. "
                    "Load the checkpoint with softplus=false."
                )
            state_dict[f"{prefix}slope"] = inverse_softplus(slope) if self.softplus else slope

    def head_slopes(self) -> tuple[float, ...] | Tensor:
        """Return one slope per head: floats of a fixed rule, or the learned tensor (h,) float32."""
        active = self.biased_heads or self.num_heads
        rest = self.num_heads - active
        if self.radius is not None:
            # heads beyond `biased_heads` have slope 0
            return radius_slopes(self.radius, active, self.ndim[0]) + (0.0,) * rest
        if self.slopes != "learned":
            return (
                tuple((self.steepest or self.factor) * m for m in fixed_slopes(self.slopes, active))
                + (0.0,) * rest
            )
        slope = self.slope if self.slope.dtype == torch.float64 else self.slope.float()
        slope = F.softplus(slope) if self.softplus else slope
        return F.pad(slope, (0, rest)) if rest else slope

    def bias(self, pos: Positions, layer: int, x: Tensor | None = None) -> Bias | None:
        """Return the bias of block `layer`; None if `layers` excludes it."""
        self._need_axes(pos)
        return self._distance(pos) if self.active(layer) else None

    def _distance(self, pos: Positions) -> Bias:
        return DistanceBias(self.head_slopes(), pos)


class GridAlibi(AlibiBase):
    """ALiBi on grids of several axes; `alibi2d` and `alibi3d` differ in axes and defaults."""

    slopes: Slopes = "geometric"
    softplus: bool = False
    metric: Metric = "euclidean"
    wrap: bool = False
    normalize: Normalize = "none"
    reference: tuple[PositiveInt, ...] | None = None
    spacing: tuple[PositiveFloat, ...] | None = None
    layers: tuple[Integer, ...] | None = None
    jitter: NonNegativeFloat = 0.0
    biased_heads: PositiveInt | None = None

    def __post_init__(self) -> None:
        used = self.normalize == "reference"
        self.reference = training_grid(self.reference, self.ndim[0], used, f"normalize={self.normalize!r}")
        check_per_axis("spacing", self.spacing, self.ndim[0])
        if self.slopes == "radius" and self.metric == "squared":
            raise OptionError(
                "slopes=radius needs a metric linear in the distance, got metric='squared'. Use another metric."
            )
        super().__post_init__()

    def prepare(
        self, pos: Positions, generator: torch.Generator | None = None, draws: dict[str, Tensor] | None = None
    ) -> Positions:
        """Draw the jitter of this forward pass while training."""
        noise = (draws or {}).get("jitter")
        if noise is None and self.jitter and self.training and "jitter" not in pos.attrs:
            shape = (1, self.num_heads, pos.tokens, pos.tokens)
            # standard deviation of `jitter`, in logits
            noise = torch.randn(shape, generator=generator, device=pos.coords.device) * self.jitter
        if noise is None:
            return pos
        if tuple(noise.shape[1:]) != (self.num_heads, pos.tokens, pos.tokens):
            raise ShapeError(
                f"{self.name} needs a draw of jitter of shape (1 or b, {self.num_heads}, {pos.tokens}, {pos.tokens}), "
                f"got {tuple(noise.shape)}."
            )
        return pos.replace(attrs={**pos.attrs, "jitter": PerToken(noise, (2, 3))})

    def _distance(self, pos: Positions) -> Bias:
        bias = DistanceBias(
            self.head_slopes(),
            pos,
            metric=self.metric,
            wrap=self.wrap,
            normalize=self.normalize,
            reference=self.reference,
            spacing=self.spacing,
        )
        noise = pos.attrs.get("jitter") if self.jitter else None
        return bias if noise is None else SumBias([bias, DenseBias(noise.values, pos)])
