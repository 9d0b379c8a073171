"""xPos: RoPE with scores that decay with the distance to previous tokens (arXiv 2212.10554)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from vispe.attention.transform.abstract_transform import Layout
from vispe.attention.transform.pairs import PairRotation
from vispe.encodings.parts.rotary.angles import AxialRotary
from vispe.encodings.registry import register
from vispe.errors import UnsupportedCombination
from vispe.grid import Positions
from vispe.utils.options import PositiveFloat


@register
class Xpos(AxialRotary):
    """RoPE with an exponential decay: queries shrink and keys grow with position, so that earlier tokens count less.

    score(i, j) = sum_c zeta_c^((i - j) / scale_base) Re(q_c conj(k_c) e^(i (i - j) w_c))          arXiv 2212.10554

    with zeta_c = (2c + 0.4 d_h) / (1.4 d_h) for pair c and w_c = base^(-2c / d_h). For sequences under a causal mask:
    scores with later tokens grow with the distance. Text only; the outputs of a pretrained model change.

    Args:
        dim: width of the tokens, d.
        num_heads: heads, h.
        head_dim: channels of a head, d_h; dim / num_heads by default.
        causal: must be true: states that attention has a causal mask, which the encoding cannot check.
        scale_base: distance over which a pair decays by zeta_c.
        centre: position of scale 1, which does not affect scores: half the length, rounded 'down' as in x-transformers,
            or 'up' as in torchscale.
        base: ratio of the first to the (C + 1)-th frequency; the first is 1 per position.
        layout: which channels are a pair: 'half' c and c + pairs, 'interleaved' 2c and 2c + 1.
        spacing: distance between neighbouring positions, instead of `Grid.spacing`.

    Shapes: pos (n, 1) -> tables (1 or b, 1, n, pairs), of keys and of queries; prefix tokens are unchanged.
    New resolution: positions are extrapolated. The scale is relative to the middle of the full sequence; in half
        precision queries at its end underflow from some 8000 positions on.   Cost: no parameters; as RoPE.
    Invariant to: translation in scores between tokens with a position.
    Raises: UnsupportedCombination without causal=true; ShapeError for other numbers of axes than 1.
    Differs from the reference: the middle is that of the full sequence also when tokens are dropped.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("xpos(causal=true)", dim=16, num_heads=2)
        >>> encoding.transform(Grid((6,)).positions(), 0).query(torch.ones(1, 2, 6, 8)).shape
        torch.Size([1, 2, 6, 8])
    """

    name = "xpos"
    paper = "A Length-Extrapolatable Transformer, https://arxiv.org/abs/2212.10554"
    year = 2022
    ndim = (1,)
    encodes = ("distance", "direction")
    invariant = ("translation",)
    formula = (
        r"a_{ij} = \sum_c \zeta_c^{(p_i - p_j) / S} \operatorname{Re} \left( q_c \overline{k_c} \, e^{i "
        r"(p_i - p_j) \omega_c} \right)"
    )
    tested_options = ("causal=true,layout=half,centre=up", "causal=true,spacing=[2],scale_base=5")

    causal: bool = False
    scale_base: PositiveFloat = 512.0
    centre: Literal["down", "up"] = "down"
    base: PositiveFloat = 10000.0
    layout: Layout = "interleaved"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.causal:
            raise UnsupportedCombination(
                "xpos scores grow with the distance to later tokens, so it cannot be used in bidirectional attention. "
                "Use causal=true if attention is causal, or rope_axial+alibi."
            )

    def transform(self, pos: Positions, layer: int, x: Tensor | None = None) -> PairRotation:
        """Return the rotation and scale; the identity for prefix tokens."""
        self._need_axes(pos)
        return pos.remember((self.name, self.config_key), lambda: self._rotation(pos))

    def _rotation(self, pos: Positions) -> PairRotation:
        spaced = pos if self.spacing is None else pos.with_spacing(self.spacing)
        pair = torch.arange(self.pairs, dtype=torch.float64)
        # from 0.4 / 1.4 towards 1: pairs of low frequency decay slowest
        zeta = (pair + 0.4 * self.pairs) / (1.4 * self.pairs)
        # relative to the middle, to stay within the range of half precision on both sides
        half = spaced.extent / 2
        middle = half.floor() if self.centre == "down" else half.ceil()
        power = (spaced.coords - middle[:, None]) / self.scale_base * pos.spatial[..., None]
        # zeta ** power as exp(power log zeta), with the logarithm in float64
        scale = (power * zeta.log().to(power)).exp()[:, None]
        angle = self.angles(pos)
        cos, sin = angle.cos(), angle.sin()
        # queries times zeta^p and keys times zeta^-p: their product depends on the offset only
        return PairRotation(cos * scale, sin * scale, self.layout, keys=(cos / scale, sin / scale))
