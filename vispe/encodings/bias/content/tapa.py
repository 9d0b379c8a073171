"""TAPA: logits that oscillate with distance at a content-dependent frequency (arXiv 2509.12635)."""

from __future__ import annotations

import math
from typing import Annotated

import torch
from torch import Tensor

from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.dense_request import DenseRequest
from vispe.attention.bias.distance_metrics import distances
from vispe.encodings.base import Biased
from vispe.encodings.parts.bias.scores import ScoreBias
from vispe.encodings.registry import register
from vispe.errors import OptionError, counted
from vispe.grid import Positions
from vispe.utils.interval import Interval
from vispe.utils.options import NonNegativeFloat, PositiveInt, Spacing


@register
class Tapa(Biased):
    """Some channels define the amplitude of a logit, the others its phase, which grows with distance.

    logits = (q_A . k_A / sqrt(theta d)) cos(2 pi |p_i - p_j|^alpha q_P . k_P / sqrt((1 - theta) d))  arXiv 2509.12635

    A are the first theta d channels of a head, P the others. At distance 0 only the amplitude remains. The phase
    multiplies rounding errors of q and k: bfloat16 models differ from float32 by 1 to 30 %, the more the larger q and k
    are, although the logits are computed in float32.

    Args:
        dim: width of the tokens; its channels per head are d.
        num_heads: heads, h.
        head_dim: channels of a head, d_h; dim / num_heads by default.
        theta: fraction of the channels for the amplitude, rounded to an integer; above 0 and below 1.
        alpha: power of the distance; 0 distinguishes only a token from all others.
        spacing: distance between neighbouring patches per axis, instead of `Grid.spacing`.

    Shapes: pos (n, axes), q and k (b, h, n, d) -> logits (b, h, n, n); pairs with a prefix token keep q . k / sqrt(d).
    New resolution: distances are extrapolated; for small alpha they grow slowly.
    Cost: no parameters; two products instead of one, and dense logits for every image.
    Invariant to: translation, rotation by any angle and reflection, when patches keep their content.
    Raises: ShapeError without queries and keys; OptionError if amplitude or phase has no channel.
    Differs from the reference: no code is public; euclidean distances on grids, while the paper has one axis, and no
        mask: pass is_causal to attention for its language models. Pretrained models need retraining, since the products
        of queries and keys are split.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("tapa", dim=16, num_heads=2)
        >>> q = torch.ones(1, 2, 6, 8)
        >>> encoding.bias(Grid((2, 3)).positions(), 0).dense(q=q, k=q).shape
        torch.Size([1, 2, 6, 6])
    """

    name = "tapa"
    paper = "Positional Encoding via Token-Aware Phase Attention, https://arxiv.org/abs/2509.12635"
    year = 2025
    ndim = (1, 2, 3)
    encodes = ("distance", "content")
    invariant = ("translation", "quarter_turns", "reflection", "rotation")
    formula = (
        r"a_{ij} = \frac{q_A \cdot k_A}{\sqrt{\theta d}} \cos \left( 2 \pi \, |p_i - p_j|^\alpha \, "
        r"\frac{q_P \cdot k_P}{\sqrt{(1 - \theta) d}} \right)"
    )
    tested_options = ("theta=0.3,alpha=1", "alpha=0,spacing=[2,0.5]")

    dim: PositiveInt
    num_heads: PositiveInt
    head_dim: PositiveInt | None = None
    theta: Annotated[float, Interval(above=0, below=1)] = 0.5
    alpha: NonNegativeFloat = 0.1
    spacing: Spacing | None = None

    def __post_init__(self) -> None:
        width = self._resolve_head_dim()
        # amplitude and phase need at least one channel each
        if not 0 < round(self.theta * width) < width:
            raise OptionError(
                f"tapa needs channels of both kinds, got theta={self.theta:g} of {counted(width, 'channel')} per "
                "head. Use another theta or fewer heads."
            )
        if self.spacing is not None:
            self._accept(len(self.spacing))

    def bias(self, pos: Positions, layer: int, x: Tensor | None = None) -> Bias | None:
        """Return the logits; `dense` depends on queries and keys."""
        self._need_axes(pos)
        return PhaseScores(pos, self.theta, self.alpha, self.spacing)


class PhaseScores(ScoreBias):
    """The logits of `Tapa`."""

    __slots__ = ("alpha", "spacing", "theta")
    of = "tapa"

    def __init__(self, pos: Positions, theta: float, alpha: float, spacing: tuple[float, ...] | None) -> None:
        super().__init__(pos)
        self.theta, self.alpha, self.spacing = theta, alpha, spacing

    def scores(
        self, q: Tensor, k: Tensor, scale: float, pos_q: Positions, pos_k: Positions, request: DenseRequest
    ) -> Tensor:
        """Return the logits (b, h, n, m)."""
        width = q.shape[-1]
        cut = round(self.theta * int(width))
        # two dot products per pair, each scaled by its number of channels
        amplitude = (q[..., :cut] @ k[..., :cut].transpose(-1, -2)) * (self.theta * width) ** -0.5
        phase = (q[..., cut:] @ k[..., cut:].transpose(-1, -2)) * ((1 - self.theta) * width) ** -0.5
        return amplitude * (2 * math.pi * self._reach(pos_q, pos_k) * phase).cos()

    def _reach(self, pos_q: Positions, pos_k: Positions) -> Tensor:
        """Return distance ** alpha, (b or 1, 1, n, m); 0 at distance 0, where its gradient may be infinite."""

        def make() -> Tensor:
            a, b = (p if self.spacing is None else p.with_spacing(self.spacing) for p in (pos_q, pos_k))
            distance = distances(a, b, "euclidean", wrap=False, normalize="none")[:, None]
            nonzero = distance > 0
            # 1 in place of distance 0, where the power has an infinite gradient
            return torch.where(nonzero, torch.where(nonzero, distance, 1.0) ** self.alpha, 0.0)

        key = ("tapa", self.alpha, self.spacing)
        # cached for self-attention only, where queries and keys have the same positions
        return pos_q.remember(key, make) if pos_k is pos_q else make()
