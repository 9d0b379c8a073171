"""RoSE: rotary embedding of physical positions, with an optional learned function of the spacing."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vispe.attention.precision import at_least_float32
from vispe.attention.transform.abstract_transform import Layout, Transform
from vispe.attention.transform.pairs import PairRotation
from vispe.encodings.base import Rotary
from vispe.encodings.registry import register
from vispe.errors import OptionError, counted
from vispe.grid import Positions
from vispe.grid.position_fields import spacing_of
from vispe.utils.options import Axes, NonNegativeFloat, PositiveFloat, PositiveInt, Spacing, UnitInterval

Scaling = Literal["sqrt", "linear", "adaptive", "none"]
SpacingScale = Literal["none", "identity", "log", "rope"]
# (a, b, c, d) at the start
_STARTS = {"identity": (1.0, 1.0, 0.0, 1.0), "log": (0.0, 1.0, 1.0, 1.0), "rope": (0.0, 0.0, 0.0, 1.0)}
_SMALLEST = 1e-8  # lower bound of d in the logarithm


@register
class Rose(Rotary):
    """Rotates queries and keys by learned frequencies times physical positions; the use of the spacing may be learned.

    Pair j of head h rotates by w_hj . p, with p = index * g(s) per axis, g(s) = s or a s^b + c ln(s / d)     RoSE

    The spacing s is that of the grid, in any length unit. All angles are proportional to it, so divide spacings by
    a reference of your data set: in nm, angles are 1000 times those in um. ``rose.scale`` learns a, b, c and d, so that
    grids of different magnification need not be compared in proportion to their spacing.

    Args:
        dim: width of the tokens, d.
        num_heads: heads, h.
        head_dim: channels of a head, d_h; dim / num_heads by default.
        axes: axes of the grids; frequencies are (rotary heads, pairs, axes), in the order of the axes.
        temperature: base T of the frequencies. They start at T'^(-i / n), where i counts the n pairs of all rotary
            heads: the first head has the fastest pairs, the last head the slowest. All axes start equal, so that
            (1, 0) and (0, 1) have equal angles until training (or `init_std`) separates them.
        temperature_scaling: 'sqrt' for T' = T^(1 / sqrt(axes)), 'linear' for T^(1 / axes), 'adaptive' for
            T^(2 / (axes h d_h)), 'none' for T.
        rotary_ratio: fraction of the heads that are rotated, the first ones; the other heads have no position.
        init_std: standard deviation of the logarithm of the factor by which learned frequencies start.
        trainable: whether the frequencies are learned; they are saved either way.
        spacing_scale: g(s) and its start: 'none' for g(s) = s; 'identity' starts at s, 'log' at ln(s), 'rope'
            at 0, which rotates nothing until it is trained. With 'log', a spacing of 1 gives 0, and one below 1
            mirrors the axis.
        learn_scale: whether a, b, c and d of each axis are learned.
        layout: which channels are a pair: 'interleaved' 2c and 2c + 1, 'half' c and c + pairs.
        spacing: distance between neighbouring patches per axis, instead of `Grid.spacing`.

    Shapes: pos.coords (1 or b, n, axes) -> tables (1 or b, h, n, pairs) float32; prefix tokens are not rotated.
    New resolution: positions continue in physical units.   Cost: axes * d / 2 parameters per block (4 axes more with
        learn_scale), O(n d) per block.
    Invariant to: translation in scores between patches (not of prefix tokens with patches); norms are preserved.
    Raises: ShapeError if `pos` has other axes; OptionError for incompatible options.
    Differs from the reference: frequencies and scales that are not learned are saved with the model. Offsets of grids
        in physical space, which it does not have, are multiplied by g(s) / s.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("rose", dim=16, num_heads=2)
        >>> encoding.transform(Grid((2, 3), spacing=(4, 1.5)).positions(), 0).query(torch.ones(1, 2, 6, 8)).shape
        torch.Size([1, 2, 6, 8])
    """

    name = "rose"
    paper = "Rotary Spatial Embeddings (RoSE), https://github.com/rhoadesScholar/RoSE"
    year = 2025
    ndim = (1, 2, 3)
    encodes = ("distance", "direction")
    invariant = ("translation",)
    formula = (
        r"\theta_{hj}(p) = \sum_a \omega_{hja} \frac{g_a(s_a)}{s_a} p_a, \quad "
        r"g_a(s) = \alpha_a s^{\beta_a} + \gamma_a \ln (s / \delta_a), \quad q'_j = e^{i \theta_{hj}(p)} q_j"
    )
    tested_options = (
        "axes=1,temperature_scaling=none",
        "axes=3,temperature_scaling=linear",
        "temperature=50,temperature_scaling=adaptive,init_std=0",
        "rotary_ratio=0.7,layout=half",
        "spacing_scale=log,spacing=[5,0.7]",
        "spacing_scale=rope,trainable=false",
        "spacing_scale=log,learn_scale=true,spacing=[2,0.5]",
    )
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "scale": {"spacing_scale": "identity", "learn_scale": True},
    }

    dim: PositiveInt
    num_heads: PositiveInt
    head_dim: PositiveInt | None = None
    axes: Axes = 2
    temperature: PositiveFloat = 10000.0
    temperature_scaling: Scaling = "sqrt"
    rotary_ratio: UnitInterval = 1.0
    init_std: NonNegativeFloat = 0.02
    trainable: bool = True
    spacing_scale: SpacingScale = "none"
    learn_scale: bool = False
    layout: Layout = "interleaved"
    spacing: Spacing | None = None

    def __post_init__(self) -> None:
        width = self._resolve_head_dim()
        if width % 2:
            raise OptionError(
                f"rose needs pairs of channels, got head_dim={width} (dim={self.dim}, num_heads={self.num_heads}). "
                "Choose another num_heads."
            )
        if self.learn_scale and self.spacing_scale == "none":
            raise OptionError(
                "learn_scale=True needs a function of the spacing, got spacing_scale='none'. "
                "Use spacing_scale='identity', which starts equal to 'none'."
            )
        if self.spacing is not None and len(self.spacing) != self.axes:
            raise OptionError(
                f"spacing needs one number for each of {counted(self.axes, 'axis')}, got spacing={list(self.spacing)}."
            )
        self._accept(self.axes)
        self.pairs = width // 2
        channels = self.num_heads * width
        # whole heads, rounded down
        self.rotary_heads = int(channels * self.rotary_ratio) // width
        if not self.rotary_heads:
            raise OptionError(
                f"rotary_ratio={self.rotary_ratio:g} rotates none of {counted(self.num_heads, 'head')}. Use at least "
                f"{1 / self.num_heads:.3g}, or the encoding 'none'."
            )
        freqs = torch.empty(self.rotary_heads, self.pairs, self.axes)
        self.freqs = nn.Parameter(freqs) if self.trainable else nn.Buffer(freqs)
        for name in self._scale_names:
            start = torch.empty(self.axes)
            setattr(self, name, nn.Parameter(start) if self.learn_scale else nn.Buffer(start))
        self.reset_parameters()

    @property
    def per_layer(self) -> bool:
        """Whether frequencies or scales are learned, per block."""
        return self.trainable or self.learn_scale

    @property
    def _scale_names(self) -> tuple[str, ...]:
        return () if self.spacing_scale == "none" else ("scale_a", "scale_b", "scale_c", "scale_d")

    def reset_parameters(self) -> None:
        """Set log-spaced frequencies, equal on all axes, times exp(N(0, init_std)) if learned, and the scale."""
        exponents = {
            "sqrt": 1 / math.sqrt(self.axes),
            "linear": 1 / self.axes,
            "adaptive": 2 / (self.axes * self.num_heads * self._resolve_head_dim()),
            "none": 1.0,
        }
        base, count = self.temperature ** exponents[self.temperature_scaling], self.freqs[..., 0].numel()
        # one geometric sequence over the pairs of all heads; it does not restart in each head
        line = base ** (-torch.arange(count, dtype=torch.float64) / count)
        with torch.no_grad():
            self.freqs.copy_(line.reshape(*self.freqs.shape[:-1], 1).expand_as(self.freqs))
            if self.trainable and self.init_std:
                self.freqs.mul_((torch.randn_like(self.freqs) * self.init_std).exp())
        for name, value in zip(self._scale_names, _STARTS.get(self.spacing_scale, ()), strict=True):
            nn.init.constant_(getattr(self, name), value)

    def scaled_coords(self, pos: Positions) -> Tensor:
        """Return the positions that frequencies multiply, (b or 1, n, axes), in float32 or better."""
        pos = pos if self.spacing is None else pos.with_spacing(self.spacing)
        if self.spacing_scale == "none":
            return pos.coords
        spacing = spacing_of(pos)  # (b or 1, n or 1, axes)
        a, b, c, d = (at_least_float32(getattr(self, name)) for name in self._scale_names)
        # axes without extent (spacing 0) have position 0; powers and logarithms stay finite
        positive = spacing > 0
        safe = torch.where(positive, spacing, torch.ones_like(spacing))
        scale = a * safe**b + c * (safe / d.clamp(min=_SMALLEST)).log()
        return pos.coords * torch.where(positive, scale / safe, torch.zeros_like(scale))

    def transform(self, pos: Positions, layer: int, x: Tensor | None = None) -> Transform:
        """Return the rotation of queries and keys; heads from `rotary_heads` on are unchanged."""
        self._need_axes(pos)

        def make() -> tuple[Tensor, Tensor]:
            angle = self._angles(pos) * pos.spatial[:, None, :, None]
            return angle.cos(), angle.sin()

        return PairRotation(*self._eval_cache(self, pos, make), self.layout)

    def _angles(self, pos: Positions) -> Tensor:
        coords, freqs = self.scaled_coords(pos), at_least_float32(self.freqs)
        # elementwise products: autocast would round a matrix product
        angle = coords[:, None, :, 0, None] * freqs[:, None, :, 0]
        for axis in range(1, self.axes):
            angle = angle + coords[:, None, :, axis, None] * freqs[:, None, :, axis]
        # heads without rotation have angle 0
        return F.pad(angle, (0, 0, 0, 0, 0, self.num_heads - self.rotary_heads))
