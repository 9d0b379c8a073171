"""BAM with scalable softmax: logits and prior scale with the number of keys (arXiv 2505.22842)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.content import GatedBias
from vispe.attention.bias.functions import OffsetBias
from vispe.attention.transform.abstract_transform import Transform
from vispe.attention.transform.affine import Affine
from vispe.encodings.base import Rotary
from vispe.encodings.parts.bias.bam_prior import PriorEncoding
from vispe.encodings.parts.ssmax import head_factor, log_keys
from vispe.encodings.registry import register
from vispe.errors import OptionError
from vispe.grid import Positions
from vispe.utils.options import PositiveInt


@register
class BamSsmax(PriorEncoding, Rotary):
    """The prior of `bam`, with logits and prior scaled by the logarithm of the number of keys.

    logits[h, i, j] = s_h ln(n_i) (q_i . k_j / sqrt(d_h) + prior[h, i, j]), n_i keys of query i   arXiv 2505.22842

    With ``scale_prior=false`` it equals ``ssmax+bam``: only the product of queries and keys is scaled.
    ``bam_ssmax.linear`` and ``bam_ssmax.gaussian`` have the shapes of the presets of `bam`.

    Args:
        num_heads: heads, h.
        scale_prior: whether the prior is scaled too.
        causal: count the keys up to the token itself, for a causal softmax along 1 axis; else all tokens of the
            sample.
        axes: number of grid axes; any by default, but required for train_loc, loc_init and axis_scale.
        shape_init: beta of the prior at the start: a number, or 'linear': from 0 to 1 over the heads.
        train_shape: whether beta is learned. Values below 0 act as 0.
        scale_init: 'slope': the prior starts with the slopes of ALiBi; a number s: with 1 / s.
        axis_scale: also learn a factor per head and axis of the offsets, initialised with 1.
        train_loc: whether the location of the peak is learned, per head and axis.
        loc_init: its initial value, on every axis.
        eps: added to the distance.
        wrap: offsets on the torus.
        spacing: distance between neighbouring patches per axis, instead of `Grid.spacing`.

    Shapes: pos (n, axes) -> bias (1, h, n, n) and a factor of queries (1 or b, h, 1 or n, 1); prefix rows and columns
        of the bias are 0, the factor is that of all tokens: prefix tokens have as many keys.
    New resolution: no resampling needed; the sharpness follows the number of tokens.
    Cost: 3 h parameters per layer, h more for each axis with train_loc or axis_scale; O(1) per score. A pretrained
        model does not keep its outputs at the start.
    Invariant to: translation, rotation by any angle, flips; translation alone with train_loc or axis_scale.
    Raises: ShapeError if `pos` has other axes; OptionError for incompatible options.
    Differs from the reference: as `bam`; two-sided: the factor is the same for all queries of an image.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("bam_ssmax", num_heads=2)
        >>> encoding.bias(Grid((2, 3)).positions(), 0).dense().shape
        torch.Size([1, 2, 6, 6])
    """

    name = "bam_ssmax"
    paper = "Bayesian Attention Mechanism, https://arxiv.org/abs/2505.22842"
    year = 2025
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "linear": {"shape_init": "linear"},
        "gaussian": {"shape_init": 2.0, "train_shape": False},
    }
    scales_channels = True
    encodes = ("distance",)
    invariant = ("translation", "quarter_turns", "reflection", "rotation")
    formula = r"a_{hij} = s_h \ln n_i \left( \frac{q_i \cdot k_j}{\sqrt{d_h}} + b_{hij} \right)"
    tested_options = ("scale_prior=false,shape_init=linear", "causal=true", "train_loc=true,axes=2")

    num_heads: PositiveInt
    scale_prior: bool = True
    causal: bool = False

    def __post_init__(self) -> None:
        # before super(), which calls `reset_parameters`
        self.seq_scale = nn.Parameter(torch.empty(self.num_heads))
        super().__post_init__()
        if self.causal and 1 not in self.ndim:
            raise OptionError(
                f"causal=True counts keys along 1 axis, got axes={self.axes}, spacing={self.spacing}. Omit it."
            )
        if self.causal:
            self._accept(1)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the parameters to the values of the options; the scales are 1."""
        super().reset_parameters()
        nn.init.ones_(self.seq_scale)

    def transform(self, pos: Positions, layer: int, x: Tensor | None = None) -> Transform:
        """Return the scaling of queries."""
        self._need_axes(pos)
        return Affine(q_mul=self._factor(pos))

    def bias(self, pos: Positions, layer: int, x: Tensor | None = None) -> Bias | None:
        """Return the prior, scaled like the logits."""
        prior = self._prior(pos)
        if not self.scale_prior:
            return prior
        # (b or 1, h, n or 1, 1) -> (b or 1, h, n or 1)
        factor = self._factor(pos)[..., 0]
        # a factor per query or per sample is not a function of the offset
        if self.causal or len(factor) > 1:
            return GatedBias(factor.expand(-1, -1, pos.tokens), None, prior)
        # one factor for all queries: the prior remains a table
        return OffsetBias(
            lambda step: factor[0] * self._fall(step),
            pos,
            wrap=self.wrap,
            spacing=self.spacing,
            depends_on=self._sources("scaled"),
        )

    def _factor(self, pos: Positions) -> Tensor:
        return head_factor(self.seq_scale, log_keys(pos, self.causal))
