"""PoPE: polar coordinates: channel content as magnitude, position as angle (arXiv 2509.10534)."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from vispe.attention.precision import at_least_float32
from vispe.attention.transform.abstract_transform import Layout
from vispe.attention.transform.expand import Expand
from vispe.encodings.base import Rotary
from vispe.encodings.parts.rotary.rope.axial_pairs import even_counts, spread_angles
from vispe.encodings.registry import register
from vispe.errors import OptionError, ShapeError, counted
from vispe.grid import Positions
from vispe.utils.interval import Interval
from vispe.utils.options import PositiveFloat, PositiveInt, Shape, Spacing


@register
class Pope(Rotary):
    """Maps every channel of queries and keys to a magnitude, rotated by an angle that depends only on the position.

    score(i, j) = sum_c softplus(q_ic) softplus(k_jc) cos((p_j - p_i) w_c + clamp(bias_hc, -2 pi, 0))  arXiv 2509.10534

    Channel c of the C of an axis has w_c = base^(-c / C): one frequency per channel, while RoPE has one per
    pair. Content affects only magnitudes, and position only angles. ``pope.text`` has the base of language models.

    Pretrained models change: no setting makes it the identity, because of the softplus.

    Args:
        dim: width of the tokens; its channels per head are d.
        num_heads: heads, h.
        head_dim: channels of a head, d_h; dim / num_heads by default.
        base: ratio of the first to the (C + 1)-th frequency of an axis; the first is 1 per unit of the
            spacing.
        rotated: fraction r / d of the channels of a head, the first r, that become magnitudes; others are unchanged.
        split: channels per axis, first axis first, r in total; by default divided as evenly as possible. The
            last axis (x) has the first channels.
        init: initial biases: 'zeros', or 'uniform' in -2 pi to 0. A bias that has risen above 0 has no gradient.
        layout: whether the cosines of all channels precede the sines ('half') or alternate with them
            ('interleaved'); scores do not differ.
        spacing: distance between neighbouring patches per axis, instead of `Grid.spacing`.

    Shapes: pos (n, axes) -> tables (1 or b, h, n, r); queries and keys have d + r channels. Class and register tokens
        are at angle 0 with bias 0, and become magnitudes too.
    New resolution: coordinates are extrapolated.   Cost: h r parameters per layer; queries and keys of twice the width.
    Invariant to: translation in scores between patches (not of prefix tokens with patches).
    Raises: ShapeError if `split` is for other axes than `pos` has; OptionError for incompatible options.
    Differs from the reference: scores are scaled by d ** -0.5, not by the wider head; base 100 by default, for grids of
        tens of patches; prefix tokens have no position; a bias of exactly 0 has a gradient in every version of torch.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("pope", dim=16, num_heads=2)
        >>> encoding.transform(Grid((2, 3)).positions(), 0).query(torch.ones(1, 2, 6, 8)).shape
        torch.Size([1, 2, 6, 16])
    """

    name = "pope"
    paper = "Decoupling the What and Where With Polar Coordinate Positional Embeddings, https://arxiv.org/abs/2509.10534"
    year = 2025
    ndim = (1, 2, 3)
    presets: ClassVar[dict[str, dict[str, Any]]] = {"text": {"base": 10000.0}}
    encodes = ("distance", "direction")
    invariant = ("translation",)
    formula = (
        r"a_{ij} = \sum_c \operatorname{softplus}(q_{ic}) \operatorname{softplus}(k_{jc}) \cos \left( "
        r"(p_j - p_i) \omega_c + \operatorname{clamp}(\delta_{hc}, -2 \pi, 0) \right)"
    )
    tested_options = ("rotated=0.75,layout=half", "split=[2,1,5],init=uniform", "spacing=[2,0.5]")

    dim: PositiveInt
    num_heads: PositiveInt
    head_dim: PositiveInt | None = None
    base: PositiveFloat = 100.0
    rotated: Annotated[float, Interval(above=0, most=1)] = 1.0
    split: Shape | None = None
    init: Literal["zeros", "uniform"] = "zeros"
    layout: Layout = "interleaved"
    spacing: Spacing | None = None

    def __post_init__(self) -> None:
        width = self._resolve_head_dim()
        self.channels = round(width * self.rotated)
        # a fraction such as 2/3 of the width is not exact in binary, hence the tolerance
        if not self.channels or abs(self.channels - width * self.rotated) > 1e-6 * width:
            raise OptionError(
                f"pope needs an integer number of channels, got rotated={self.rotated:g} of {width} per head. "
                f"Use {max(self.channels, 1)}/{width}."
            )
        if self.split is not None and sum(self.split) != self.channels:
            raise OptionError(
                f"split needs {counted(self.channels, 'channel')} in total, got split={list(self.split)}. Change "
                "split or rotated."
            )
        axes = {len(option) for option in (self.split, self.spacing) if option is not None}
        if len(axes) > 1:
            raise OptionError(
                f"split and spacing need the same number of axes, got split={self.split}, spacing={self.spacing}. "
                "Pass one number per axis in both."
            )
        # without split and spacing: every number of axes with at least one channel each
        self._accept(*(n for n in self.ndim if (n in axes if axes else n <= self.channels)))
        self.bias = nn.Parameter(torch.empty(self.num_heads, self.channels))
        self.reset_parameters()

    @property
    def per_layer(self) -> bool:
        """True: every layer has its own biases."""
        return True

    def reset_parameters(self) -> None:
        """Set the biases to 0, or draw them."""
        nn.init.uniform_(self.bias, -2 * math.pi, 0) if self.init == "uniform" else nn.init.zeros_(self.bias)

    def transform(self, pos: Positions, layer: int, x: Tensor | None = None) -> Expand:
        """Return the expansion of queries and keys; prefix tokens have angle 0."""
        if pos.axes not in self.ndim:
            raise ShapeError(
                f"pope needs {counted(' or '.join(map(str, self.ndim)), 'axis')}, for its "
                f"{counted(self.channels, 'channel')} with split={self.split} and spacing={self.spacing}, got "
                f"{counted(pos.axes, 'axis')} ({pos})."
            )
        # (2, b or 1, h, n, r): queries without the bias, then keys with it
        cos, sin = self._eval_cache(self, pos, lambda: self._tables(pos))
        return Expand(cos[0], sin[0], (cos[1], sin[1]), "softplus", self.layout)

    def _tables(self, pos: Positions) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, (2, b or 1, h, n, r) each: of queries and of keys."""
        spaced = pos if self.spacing is None else pos.with_spacing(self.spacing)
        counts = self.split or even_counts(self.channels, pos.axes)
        angle = spread_angles(spaced, counts, self.base)
        bias = at_least_float32(self.bias)[:, None]
        # not clamp, which has no gradient at its bounds: biases start at the bound 0
        bias = bias.masked_fill(bias > 0, 0.0).masked_fill(bias < -2 * math.pi, -2 * math.pi)
        # tokens without a position have angle 0 as keys too, so that their scores depend on magnitudes only
        spatial = pos.spatial[:, None, :, None]
        keys = (angle + bias) * spatial
        angles = torch.stack([(angle * spatial).expand_as(keys), keys])
        return angles.cos(), angles.sin()
