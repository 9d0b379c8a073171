"""HoPE: hyperbolic rotations of pairs of channels, which decay with distance (arXiv 2509.05218)."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.dense_request import DenseRequest
from vispe.attention.precision import at_least_float32
from vispe.encodings.base import Biased
from vispe.encodings.parts.bias.scores import ScoreBias
from vispe.encodings.registry import register
from vispe.errors import OptionError, counted
from vispe.grid import Positions
from vispe.utils.interval import Interval
from vispe.utils.options import Axes, PositiveInt, Spacing, check_per_axis

MARGIN = 1e-4  # by which the decay exceeds the fastest growth


@register
class HopeHyperbolic(Biased):
    """Rotates pairs of channels hyperbolically by the offset, with decay, so that no score grows with distance.

    logits = scale sum_c exp(-|D| t) ((q1 k1 + q2 k2) cosh(D w_c) + (q1 k2 + q2 k1) sinh(D w_c)), D = p_i - p_j

    over pairs (q1, q2) of neighbouring channels, w_c = temperature^(-c / J), t = 1 + 1e-4 + softplus(raw) above every
    w_c          arXiv 2509.05218. On several axes, each has separate J pairs and a separate t.

    Decay is strong: beyond some five units only the fastest pairs contribute. On large grids use `spacing` below 1.

    Args:
        dim: width of the tokens; its channels per head are d.
        num_heads: heads, h.
        head_dim: channels of a head, d_h; dim / num_heads by default.
        axes: number of axes, 1 to 3; J = d / 2 / axes, rounded down. Remaining channels carry content only.
        temperature: ratio of the frequencies, 1 or more.
        spacing: distance between neighbouring patches per axis, instead of `Grid.spacing`.

    Shapes: pos (n, axes), q and k (b, h, n, d) -> logits (b, h, n, n); pairs with a prefix token keep scale q . k.
    New resolution: offsets are extrapolated, far ones decay.   Cost: one parameter per axis and layer; d outer
        products of n x n for every image and head: slow, and heavy in memory.
    Invariant to: translation, when patches keep their content.
    Raises: ShapeError if `pos` has other axes, or without queries and keys; OptionError for heads without a pair per
        axis.
    Differs from the reference: several axes; two exponentials that never grow instead of cosh and sinh.
        Pretrained models need retraining: its far pairs score 0.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("hope_hyperbolic", dim=16, num_heads=2)
        >>> q = torch.ones(1, 2, 6, 8)
        >>> encoding.bias(Grid((2, 3)).positions(), 0).dense(q=q, k=q).shape
        torch.Size([1, 2, 6, 6])
    """

    name = "hope_hyperbolic"
    paper = "HoPE: Hyperbolic Rotary Positional Encoding, https://arxiv.org/abs/2509.05218"
    year = 2025
    ndim = (1, 2, 3)
    encodes = ("distance", "direction", "content")
    invariant = ("translation",)
    formula = (
        r"a_{ij} = s \sum_c e^{-|D| t} \left( (q_1 k_1 + q_2 k_2) \cosh D \omega_c + (q_1 k_2 + q_2 k_1) "
        r"\sinh D \omega_c \right), \quad D = p_i - p_j"
    )
    tested_options = ("axes=1,temperature=100", "axes=3,spacing=[1,0.1,0.1]")

    dim: PositiveInt
    num_heads: PositiveInt
    head_dim: PositiveInt | None = None
    axes: Axes = 2
    temperature: Annotated[float, Interval(least=1)] = 10000.0
    spacing: Spacing | None = None

    def __post_init__(self) -> None:
        width = self._resolve_head_dim()
        self.pairs = width // 2 // self.axes
        if not self.pairs:
            raise OptionError(
                f"hope_hyperbolic needs a pair of channels per axis, got {counted(width, 'channel')} per head for "
                f"{counted(self.axes, 'axis')}. Use fewer heads."
            )
        check_per_axis("spacing", self.spacing, self.axes)
        self._accept(self.axes)
        self.raw = nn.Parameter(torch.empty(self.axes))
        self.reset_parameters()

    @property
    def per_layer(self) -> bool:
        """True: every layer has its own decay."""
        return True

    def reset_parameters(self) -> None:
        """Set the decay before softplus to 0.5, as the reference."""
        nn.init.constant_(self.raw, 0.5)

    def decay(self) -> Tensor:
        """Return t of every axis, (axes,) in float32 or better."""
        return F.softplus(at_least_float32(self.raw)) + (1 + MARGIN)

    def bias(self, pos: Positions, layer: int, x: Tensor | None = None) -> Bias | None:
        """Return the logits; `dense` depends on queries and keys."""
        self._need_axes(pos)
        return HyperbolicScores(pos, self.decay(), self.pairs, self.temperature, self.spacing)


class HyperbolicScores(ScoreBias):
    """The logits of `HopeHyperbolic`."""

    __slots__ = ("decay", "pairs", "spacing", "temperature")
    of = "hope_hyperbolic"

    def __init__(
        self, pos: Positions, decay: Tensor, pairs: int, temperature: float, spacing: tuple[float, ...] | None
    ) -> None:
        super().__init__(pos)
        self.decay, self.pairs, self.temperature, self.spacing = decay, pairs, temperature, spacing

    def scores(
        self, q: Tensor, k: Tensor, scale: float, pos_q: Positions, pos_k: Positions, request: DenseRequest
    ) -> Tensor:
        """Return the logits (b, h, n, m)."""
        a, b = (p if self.spacing is None else p.with_spacing(self.spacing) for p in (pos_q, pos_k))
        gap = a.coords[:, :, None] - b.coords[:, None]
        rates = [self.temperature ** (-c / self.pairs) for c in range(self.pairs)]
        # in the light-cone basis, q1 + q2 and q1 - q2, a hyperbolic rotation is diagonal: exp(D w) and exp(-D w)
        used = 2 * self.pairs * pos_q.axes
        (q_up, q_down), (k_up, k_down) = (
            (x[..., 0:used:2] + x[..., 1:used:2], x[..., 0:used:2] - x[..., 1:used:2]) for x in (q, k)
        )
        # channels that belong to no axis
        total = 2 * q[..., used:] @ k[..., used:].transpose(-1, -2)
        for axis in range(pos_q.axes):
            step = gap[:, None, ..., axis]
            fall = step.abs() * self.decay[axis]
            for i, rate in enumerate(rates):
                c = axis * self.pairs + i
                # combined exponents are below 0: cosh alone would overflow
                rise, sink = (step * rate - fall).exp(), (-step * rate - fall).exp()
                total = total + q_up[..., c, None] * k_up[..., None, :, c] * rise
                total = total + q_down[..., c, None] * k_down[..., None, :, c] * sink
        # products in the light-cone basis are twice those of the channels
        return total * (scale / 2)
