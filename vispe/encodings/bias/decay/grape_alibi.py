"""GRAPE-A on grids: ALiBi with slopes gated by queries and keys (arXiv 2512.07805, sections on A and appendix G)."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.distance_bias import DistanceBias
from vispe.attention.bias.distance_metrics import Metric
from vispe.attention.precision import at_least_float32
from vispe.encodings.base import Biased
from vispe.encodings.parts.bias.slopes import fixed_slopes
from vispe.encodings.parts.rotary.grape_rank2 import ContentGateBias, OneSidedBias
from vispe.encodings.registry import register
from vispe.errors import OptionError, ShapeError, counted
from vispe.grid import Positions
from vispe.utils.options import PositiveFloat, PositiveInt

Gates = Literal["none", "key", "query", "query_key"]
FixedSlopes = Literal["alibi", "geometric", "constant"]


@register
class GrapeAlibi(Biased):
    """Attention falls off with distance, with slopes scaled by gates of the query and the key.

    bias = -slope_h softplus(omega_h) (gate_q(i) + gate_k(j)) |p_i - p_j|          arXiv 2512.07805

    gate_k(j) = softplus(k_j . u_h / (|u_h| sqrt(d_h))), gate_q(i) = softplus(q_i . v_h / (|v_h| sqrt(d_h))), of queries
    and keys before any rotation.

    Args:
        dim: width of the tokens, d.
        num_heads: heads, h.
        head_dim: channels of a head, d_h; dim / num_heads by default.
        gates: 'key', 'query', 'query_key' (both), or 'none': plain ALiBi, without omega.
        slopes: 'alibi' (the rule of arXiv 2108.12409), 'geometric' (2^(-8k/h)) or 'constant' (1).
        metric: 'euclidean', 'manhattan', 'chebyshev' or 'squared' (euclidean, squared), in units of the spacing.
        wrap: distances on the torus: per axis min(d, n - d).
        normalize: 'max' divides by the largest distance in the grid, 'none' not at all.
        causal: max(p_i - p_j, 0) instead of the distance, as the released language models; 1 axis only.
        l2_norm: whether u and v are divided by their length.
        spacing: distance between neighbouring patches per axis, instead of `Grid.spacing`.

    Presets: ``grape_alibi.additive``, ``grape_alibi.key`` and ``grape_alibi.query_key`` have the gates of the paper's
        models; the last is the default.

    Shapes: pos (n, axes) -> bias (b, h, n, n); prefix rows and columns are 0.
    New resolution: no resampling needed; a step costs the same.   Cost: h (2 d_h + 1) parameters per layer; the bias is
        made dense for every image.
    Invariant to: translation, at equal queries and keys; rotation by 90 degrees and flips of a square grid.
    Raises: ShapeError for causal=True on a grid of several axes, or without queries and keys.
    Differs from the reference: distances on grids, while the reference has one causal axis (as causal=True).

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("grape_alibi", dim=16, num_heads=2)
        >>> q = torch.ones(1, 2, 6, 8)
        >>> encoding.bias(Grid((2, 3)).positions(), 0).dense(q=q, k=q).shape
        torch.Size([1, 2, 6, 6])
    """

    name = "grape_alibi"
    paper = "Group Representational Position Encoding, https://arxiv.org/abs/2512.07805"
    year = 2025
    ndim = (1, 2, 3)
    encodes = ("distance", "content")
    invariant = ("translation", "quarter_turns", "reflection", "rotation")
    formula = (
        r"b_{hij} = -m_h \operatorname{softplus}(\omega_h) \left( g^q_i + g^k_j \right) \lVert p_i - p_j "
        r"\rVert"
    )
    tested_options = (
        "gates=query",
        "slopes=geometric,metric=manhattan",
        "wrap=true,normalize=max",
        "l2_norm=false",
        "spacing=[2,0.5]",
    )
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "additive": {"gates": "none"},
        "key": {"gates": "key"},
        "query_key": {"gates": "query_key"},
    }

    dim: PositiveInt
    num_heads: PositiveInt
    head_dim: PositiveInt | None = None
    gates: Gates = "query_key"
    slopes: FixedSlopes = "alibi"
    metric: Metric = "euclidean"
    wrap: bool = False
    normalize: Literal["max", "none"] = "none"
    causal: bool = False
    l2_norm: bool = True
    spacing: tuple[PositiveFloat, ...] | None = None

    def __post_init__(self) -> None:
        width = self._resolve_head_dim()
        measured = (
            self.wrap or self.normalize != "none" or self.metric != "euclidean" or self.spacing is not None
        )
        if self.causal and measured:
            raise OptionError(
                "metric, wrap, normalize and spacing have no effect with causal=True, which counts steps back. Omit "
                "them."
            )
        if self.gates == "none" and not self.l2_norm:
            raise OptionError("l2_norm=False has no effect with gates='none'. Omit it.")
        if self.causal or self.spacing is not None:
            self._accept(1 if self.spacing is None else len(self.spacing))
        gates = self.gates
        # only the gates in use have parameters
        self.omega = None if gates == "none" else nn.Parameter(torch.empty(self.num_heads))
        self.u = nn.Parameter(torch.empty(self.num_heads, width)) if "key" in gates else None
        self.v = nn.Parameter(torch.empty(self.num_heads, width)) if "query" in gates else None
        self.reset_parameters()

    @property
    def per_layer(self) -> bool:
        """True: every layer has its own gates."""
        return self.gates != "none"

    def reset_parameters(self) -> None:
        """Set softplus(omega) to 1 and draw u and v from N(0, 1 / d_h)."""
        if self.omega is not None:
            # softplus(log(e - 1)) = 1
            nn.init.constant_(self.omega, math.log(math.e - 1))
        for direction in (self.u, self.v):
            if direction is not None:
                nn.init.normal_(direction, std=direction.shape[1] ** -0.5)

    def head_slopes(self) -> tuple[float, ...]:
        """Return one slope per head."""
        return fixed_slopes(self.slopes, self.num_heads)

    def bias(self, pos: Positions, layer: int, x: Tensor | None = None) -> Bias | None:
        """Return the bias; `dense` depends on queries and keys unless gates='none'."""
        if pos.axes not in self.ndim:  # restricted by the options
            option = "causal=True" if self.causal else f"spacing={self.spacing}"
            raise ShapeError(
                f"grape_alibi needs {self.ndim[0]} axis with {option}, got {counted(pos.axes, 'axis')} ({pos})."
            )
        if self.causal:
            # offsets to later keys count as 0
            profile: Bias = OneSidedBias(self.head_slopes(), pos)
        else:
            profile = DistanceBias(
                self.head_slopes(),
                pos,
                metric=self.metric,
                wrap=self.wrap,
                normalize=self.normalize,
                spacing=self.spacing,
            )
        if self.omega is None:
            return profile
        # the profile is 0 for pairs with prefix tokens, so their gates have no effect
        return ContentGateBias(profile, self.omega, self._unit(self.u), self._unit(self.v))

    def _unit(self, direction: Tensor | None) -> Tensor | None:
        if direction is None:
            return None
        wide = at_least_float32(direction)
        # of unit length, so that the logit of the gate does not depend on |u|
        return F.normalize(wide, dim=-1) if self.l2_norm else wide
