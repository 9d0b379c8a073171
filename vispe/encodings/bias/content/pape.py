"""PaPE: parabolas of projected positions, with content-dependent coefficients per query (arXiv 2602.01418)."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.content import GatedBias
from vispe.attention.bias.dense import LowRankBias
from vispe.attention.bias.distance_bias import DistanceBias
from vispe.attention.precision import at_least_float32
from vispe.encodings.base import Biased
from vispe.encodings.parts.layers import PreciseLinear
from vispe.encodings.registry import register
from vispe.errors import OptionError, ShapeError
from vispe.grid import Positions
from vispe.utils.options import Axes, PositiveFloat, PositiveInt, check_per_axis


@register
class PaPE(Biased):
    """Bias of parabolas over projected positions, with widths and slopes computed from the query's token.

    bias[h, i, j] = scale * sum_m -a_hm(i) (u_j - u_i)^2 - b_hm(i) (u_j - u_i)          arXiv 2602.01418
    radial:       = scale * -a_h(i) s_h^2 |p_j - p_i|^2

    u = P_hm . p with a learned row P_hm for each head and parabola, a = softplus(W_a x) and b = W_b x of the layer's
    input x, scale = 1 / sqrt(d_h), as for q . k. In the radial form, s_h is a fixed number, drawn once.

    Args:
        dim: width of the tokens, d.
        num_heads: heads, h.
        head_dim: channels of a head, d_h; dim / num_heads by default.
        axes: number of axes.
        form: 'projected' (the first line) or 'radial' (the second, isotropic).
        parabolas: number per head, m; one per axis by default. Only for 'projected'.
        spacing: distance between neighbouring patches per axis, instead of `Grid.spacing`.

    Presets: ``pape.ri`` is the rotation-invariant form.

    Shapes: pos (n, axes), x (b, n, d) -> bias (b, h, n, n); prefix rows and columns are 0.
    New resolution: no resampling needed; a step costs the same.   Cost: h m (axes + 2 d) parameters per layer, d h in
        the radial form; O(m) per score, as 2 m + 1 extra columns of q and k, or one factor per query.
    Invariant to: translation, at equal tokens; in the radial form rotation by any angle and reflection too.
    Raises: ShapeError for another number of axes or without the tokens x; OptionError for options that do not fit
        together.
    Differs from the reference: coordinates are centred first, which changes only the rounding; prefix tokens, which the
        reference does not have, get no bias.

    Pretrained models need fine-tuning with it: a is initially about 0.7, which suppresses far patches.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("pape", dim=16, num_heads=2)
        >>> encoding.bias(Grid((2, 3)).positions(), 0, torch.ones(1, 6, 16)).dense().shape
        torch.Size([1, 2, 6, 6])
    """

    name = "pape"
    paper = "Parabolic Position Encoding, https://arxiv.org/abs/2602.01418"
    year = 2026
    ndim = (1, 2, 3)
    presets: ClassVar[dict[str, dict[str, Any]]] = {"ri": {"form": "radial"}}
    fused = True
    encodes = ("distance", "direction", "content")
    reads_tokens = True
    invariant = ("translation",)
    formula = r"b_{hij} = s \sum_m - a_{hm}(i) \, (u_j - u_i)^2 - b_{hm}(i) \, (u_j - u_i)"
    tested_options = ("parabolas=3", "axes=1,parabolas=1", "axes=3", "form=radial,spacing=[2,0.5]")
    preset_invariant: ClassVar[dict[str, tuple[str, ...]]] = {
        "ri": ("translation", "quarter_turns", "reflection", "rotation")
    }

    dim: PositiveInt
    num_heads: PositiveInt
    head_dim: PositiveInt | None = None
    axes: Axes = 2
    form: Literal["projected", "radial"] = "projected"
    parabolas: PositiveInt | None = None
    spacing: tuple[PositiveFloat, ...] | None = None

    def __post_init__(self) -> None:
        self._accept(self.axes)
        self._resolve_head_dim()
        check_per_axis("spacing", self.spacing, self.axes)
        if self.form == "radial":
            if self.parabolas is not None:
                raise OptionError(
                    f"parabolas={self.parabolas} has no effect with form='radial', which has one per head. Omit it."
                )
            self.a = PreciseLinear(self.dim, self.num_heads, bias=False)
            self.register_buffer("position_scales", torch.empty(1, self.num_heads, 1, 1))
        else:
            rows = self.num_heads * (self.parabolas or self.axes)
            self.position = PreciseLinear(self.axes, rows, bias=False)
            self.ab = PreciseLinear(self.dim, 2 * rows, bias=False)
        self.reset_parameters()

    @property
    def per_layer(self) -> bool:
        """True: every layer has its own weights."""
        return True

    def reset_parameters(self) -> None:
        """Draw the projections as torch does, and the scales of the radial form from U(-1, 1) / sqrt(axes)."""
        if self.form == "radial":
            self.a.reset_parameters()
            nn.init.uniform_(self.position_scales, -(self.axes**-0.5), self.axes**-0.5)
        else:
            self.position.reset_parameters()
            self.ab.reset_parameters()

    def bias(self, pos: Positions, layer: int, x: Tensor | None = None) -> Bias:
        """Return the bias for the tokens `x` (b, n, d)."""
        self._need_axes(pos)
        if x is None:
            raise ShapeError("pape reads the tokens. Pass x (b, n, d) to bias().")
        if self.form == "radial":
            return self._radial(pos, x)
        spaced = pos if self.spacing is None else pos.with_spacing(self.spacing)
        # only differences matter; centred coordinates have smaller rounding errors; prefix tokens are at 0
        coords = (spaced.coords - spaced.extent[:, None] / 2) * spaced.spatial[..., None]
        # (b, n, h * parabolas) -> (b, h, n, parabolas)
        u = self.position(coords).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        # (b, n, 2 h * parabolas) -> (2, b, h, n, parabolas)
        ab = self.ab(x).unflatten(-1, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        valid = spaced.spatial[:, None, :, None]
        # prefix queries have no parabola; scaling the rows scales the bias
        a, b = (t * valid * self._scale() for t in (F.softplus(ab[0]), ab[1]))
        # -a (u_j - u_i)^2 - b (u_j - u_i), expanded in powers of u_j
        row = torch.cat([((b - a * u) * u).sum(-1, keepdim=True), -a, 2 * a * u - b], -1)
        col = torch.cat([valid.to(u).expand(len(u), *u.shape[1:3], 1), u.square(), u], -1)
        return LowRankBias(row, col, pos)

    def _radial(self, pos: Positions, x: Tensor) -> Bias:
        # squared, so that factors are not negative
        scales = at_least_float32(self.position_scales).square().flatten()[:, None]
        a = F.softplus(self.a(x)).transpose(1, 2)
        profile = DistanceBias((1.0,), pos, metric="squared", spacing=self.spacing)
        return GatedBias(a * scales * self._scale(), None, profile)

    def _scale(self) -> float:
        return self._resolve_head_dim() ** -0.5
