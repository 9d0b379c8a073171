"""LightNet's MD-LRPE: linearised relative positions on several axes, for linear attention too (arXiv 2405.21022)."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from vispe.attention.precision import at_least_float32
from vispe.attention.transform.abstract_transform import Transform
from vispe.attention.transform.expand import Expand
from vispe.attention.transform.pairs import PairRotation
from vispe.encodings.base import Rotary
from vispe.encodings.registry import register
from vispe.errors import OptionError, counted
from vispe.grid import Positions
from vispe.utils.options import Axes, PositiveFloat, PositiveInt

Form = Literal["cosine", "rotate"]
Spectrum = Literal["shared", "heads"]


@register
class LightNet(Rotary):
    """Weights every channel of a query-key product by the cosine of their offset.

    cosine: x' = [x cos(phi), x sin(phi)], so q'.k' = sum_c q_c k_c cos(phi_c(p) - phi_c(p'))      arXiv 2405.21022
    rotate: pairs of neighbouring channels rotate by phi (axial RoPE)
    phi = the products p_axis * theta of all axes, concatenated and cut to the channels; theta has e numbers per head

    The map acts only on queries and keys, so it also works with linear attention, where the cosine form keeps
    channels non-negative if feature maps made them so. ``lightnet.rotate`` is the rotation;
    ``lightnet.spectrum`` has different frequencies per head, as the first of the author's implementations.

    Args:
        dim: width of the tokens; its channels per head are d.
        num_heads: heads, h.
        head_dim: channels of a head, d_h; dim / num_heads by default.
        axes: number of axes, 1 to 3.
        form: 'cosine' (e = ceil(d / axes), queries and keys get 2 d channels) or 'rotate' (e = d / 2 / axes, rounded
            down; channels beyond 2 * axes * e pass unchanged).
        spectrum: 'shared' has the same theta_i in every head; with 'heads', each head continues the spectrum of the
            last, that is, d is replaced by h d in `base`.
        base: theta_i = base ** (-2 i / d), i = 0 .. e - 1; neither axis nor image size scales it. In the cosine form
            it spans down to base ** (-2 / axes).
        learned: whether theta is a parameter, one set per layer.

    Shapes: pos (n, axes) -> tables (1, h or 1, n, d) or, rotated, (1, h or 1, n, axes * e).
    New resolution: coordinates are extrapolated, in patches (units of `Grid.spacing`); as with RoPE, unseen phases
        occur.   Cost: no parameters (learned: h e per layer); twice the width of q and k (cosine).
    Invariant to: translation.
    Raises: ShapeError if `pos` has other axes; OptionError for incompatible options.
    Differs from the reference: supports any device and prefix tokens anywhere; scores are scaled by
        d ** -0.5, not by the doubled width; MD-TPE, the recurrence that the paper adds to the input, is not included.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("lightnet", dim=16, num_heads=2)
        >>> encoding.transform(Grid((2, 3)).positions(), 0).query(torch.ones(1, 2, 6, 8)).shape
        torch.Size([1, 2, 6, 16])
    """

    name = "lightnet"
    paper = "You Only Scan Once: Efficient Multi-dimension Sequential Modeling with LightNet, https://arxiv.org/abs/2405.21022"
    year = 2024
    ndim = (1, 2, 3)
    encodes = ("distance", "direction")
    invariant = ("translation", "reflection")
    formula = r"q' \cdot k' = \sum_c q_c k_c \cos \left( \varphi_c(p) - \varphi_c(p') \right)"
    tested_options = (
        "learned=true",
        "form=rotate,learned=true,spectrum=heads",
        "base=100",
        "axes=1,form=rotate",
        "axes=3",
    )
    preset_invariant: ClassVar[dict[str, tuple[str, ...]]] = {"rotate": ("translation",)}
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "rotate": {"form": "rotate"},
        "spectrum": {"spectrum": "heads"},
    }

    dim: PositiveInt
    num_heads: PositiveInt
    head_dim: PositiveInt | None = None
    axes: Axes = 2
    form: Form = "cosine"
    spectrum: Spectrum = "shared"
    base: PositiveFloat = 10000.0
    learned: bool = False

    def __post_init__(self) -> None:
        self._accept(self.axes)
        self.head = self._resolve_head_dim()
        # cosine: rounded up, the surplus is cut in `_tables`; rotate: complete pairs only
        self.rates = -(-self.head // self.axes) if self.form == "cosine" else self.head // 2 // self.axes
        if self.rates < 1:
            raise OptionError(
                f"lightnet with form='rotate' needs a pair of channels per axis, got {counted(self.head, 'channel')} "
                f"per head for {counted(self.axes, 'axis')}. Use form=cosine."
            )
        if self.learned:
            self.theta = nn.Parameter(torch.empty(self.num_heads, self.rates))
            self.reset_parameters()

    @property
    def per_layer(self) -> bool:
        """Whether frequencies are learned, one set per layer."""
        return self.learned

    def reset_parameters(self) -> None:
        """Initialise learned frequencies with the fixed ones."""
        if self.learned:
            with torch.no_grad():
                # with spectrum='shared', all heads start with the same frequencies
                self.theta.copy_(self._fixed(self.theta.device).expand_as(self.theta))

    def frequencies(self, device: torch.device) -> Tensor:
        """Return theta (h or 1, e), float32 or better."""
        return at_least_float32(self.theta) if self.learned else self._fixed(device)

    def _fixed(self, device: torch.device) -> Tensor:
        heads = self.num_heads if self.spectrum == "heads" else 1
        # with spectrum='heads', the frequencies continue from head to head
        number = torch.arange(heads * self.rates, dtype=torch.float64).reshape(heads, -1)
        # computed in float64 and rounded once
        return (self.base ** (-2.0 * number / (heads * self.head))).to(device, torch.float32)

    def transform(self, pos: Positions, layer: int, x: Tensor | None = None) -> Transform:
        """Return the map of queries and keys; prefix tokens have phase 0."""
        self._need_axes(pos)
        if self.learned:
            cos, sin = self._eval_cache(self, pos, lambda: self._tables(pos))
        else:
            key = (self.name, self.head, self.num_heads, self.form, self.spectrum, self.base)
            cos, sin = pos.remember(key, lambda: self._tables(pos))
        return Expand(cos, sin) if self.form == "cosine" else PairRotation(cos, sin, "interleaved")

    def _tables(self, pos: Positions) -> tuple[Tensor, Tensor]:
        theta = self.frequencies(pos.coords.device)
        coords = at_least_float32(pos.coords * pos.spatial[..., None])
        # (b or 1, 1, n, axes, 1) * (1, h or 1, 1, 1, e) -> (b or 1, h or 1, n, axes * e)
        phi = (coords[:, None, ..., None] * theta[None, :, None, None]).flatten(-2)
        if self.form == "cosine":
            phi = phi[..., : self.head]
        return phi.cos(), phi.sin()
