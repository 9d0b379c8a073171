"""Relative attention of Transformer-XL and XLNet: products of queries with projected sinusoids of the offset."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.dense import SumBias
from vispe.attention.precision import exact_product
from vispe.attention.transform.abstract_transform import Transform
from vispe.attention.transform.affine import Affine
from vispe.encodings.base import Biased, Rotary
from vispe.encodings.parts.bias.content_terms import WaveBias
from vispe.encodings.parts.bias.relative import offset_rows, read_by_axis
from vispe.encodings.parts.coords import exact_device
from vispe.encodings.registry import register
from vispe.errors import ShapeError
from vispe.grid import Grid, Positions
from vispe.grid.frequencies import inverse_frequencies
from vispe.utils.options import NonNegativeFloat, PositiveEvenInt, PositiveFloat, PositiveInt, Spacing


@register
class TransformerXL(Biased, Rotary):
    """Products of queries, plus learned vectors, with keys and with projected sines and cosines of the offset.

    logits[i, j] = scale * ((q_i + u) . k_j + (q_i + v) . R(p_i - p_j) r)          arXiv 1901.02860, section 3.3

    R(o) = [sin(w o), cos(w o)], w_c = temperature^(-2c / width). On several axes each has width = dim / axes channels
    of R and as many rows of r.

    Args:
        dim: width of the tokens, d; a multiple of twice the number of axes.
        num_heads: heads, h.
        head_dim: channels of a head, d_h; dim / num_heads by default.
        std: initial standard deviation of r; 0: a pretrained model is unchanged, and v learns from the second step on.
        temperature: ratio of the longest wavelength to the shortest.
        clamp_len: offsets are clamped to it along each axis.
        spacing: distance between neighbouring patches per axis, instead of `Grid.spacing`.

    Presets: ``transformer_xl.xlnet`` draws r as XLNet does.

    Shapes: pos (n, axes) -> bias (b, h, n, n); r (d, h, d_h), r_w_bias and r_r_bias, u and v (h, d_h), both 0 at first.
        Prefix rows and columns of the bias are 0; u is not added to prefix tokens.
    New resolution: no resampling needed.
    Cost: d^2 + 2 d parameters per layer; on grids of 2 axes b h n (gh + gw) d_h, else a gather of n x n for each axis.
    Invariant to: translation, at equal queries and keys.
    Raises: ShapeError if dim is not divisible accordingly, or for clamp_len with coordinates off the grid.
    Differs from the reference: several axes; offsets in both directions and no memory of earlier segments, as in
        XLNet's bidirectional attention; r starts at 0, so that a pretrained model is unchanged at first.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("transformer_xl", dim=16, num_heads=2)
        >>> q = torch.ones(1, 2, 6, 8)
        >>> encoding.bias(Grid((2, 3)).positions(), 0).dense(q=q, k=q, scale=0.35).shape
        torch.Size([1, 2, 6, 6])
    """

    name = "transformer_xl"
    paper = "Transformer-XL, https://arxiv.org/abs/1901.02860"
    year = 2019
    ndim = (1, 2, 3)
    presets: ClassVar[dict[str, dict[str, Any]]] = {"xlnet": {"std": 0.02}}
    fused = True
    encodes = ("distance", "direction", "content")
    invariant = ("translation",)
    formula = r"a_{ij} = s \left( (q_i + u) \cdot k_j + (q_i + v) \cdot R_{p_i - p_j} r \right)"
    tested_options = ("std=0.5,temperature=100,spacing=[2,0.5]", "std=0.5,clamp_len=1.5")
    scales_channels = True

    dim: PositiveEvenInt
    num_heads: PositiveInt
    head_dim: PositiveInt | None = None
    std: NonNegativeFloat = 0.0
    temperature: PositiveFloat = 10000.0
    clamp_len: PositiveFloat | None = None
    spacing: Spacing | None = None

    def __post_init__(self) -> None:
        width = self._resolve_head_dim()
        if self.spacing is not None:
            self._accept(len(self.spacing))
        self.r = nn.Parameter(torch.empty(self.dim, self.num_heads, width))
        self.r_w_bias = nn.Parameter(torch.empty(self.num_heads, width))
        self.r_r_bias = nn.Parameter(torch.empty(self.num_heads, width))
        self.reset_parameters()

    @property
    def per_layer(self) -> bool:
        """True: every layer has its own a projection and vectors."""
        return True

    def reset_parameters(self) -> None:
        """Draw r from a normal distribution of standard deviation `std` and set u and v to 0."""
        nn.init.normal_(self.r, std=self.std) if self.std else nn.init.zeros_(self.r)
        nn.init.zeros_(self.r_w_bias)
        nn.init.zeros_(self.r_r_bias)

    def transform(self, pos: Positions, layer: int, x: Tensor | None = None) -> Transform:
        """Return the transform that adds u to the queries of patches."""
        self._need_axes(pos)
        # u is added to the query, so (q + u) . k needs no separate product
        return Affine(q_add=self.r_w_bias[:, None] * pos.spatial[:, None, :, None])

    def bias(self, pos: Positions, layer: int, x: Tensor | None = None) -> Bias:
        """Return the bias of block `layer`."""
        self._need_axes(pos)
        if self.dim % (2 * pos.axes):
            raise ShapeError(
                f"transformer_xl needs dim to be a multiple of {2 * pos.axes} for {pos.axes}-axis positions, got "
                f"dim={self.dim}. Choose another width."
            )
        width = self.dim // pos.axes
        parts = [part.transpose(0, 1) for part in self.r.split(width)]  # per axis, (h, width, d_h)
        grid = pos.grid
        # free coordinates have no table of offsets: sines and cosines of every token are multiplied instead
        if grid is None or not pos.on_grid:
            return self._free(pos, parts)
        # (2 n - 1, width) @ (h, width, d_h) -> (h, 2 n - 1, d_h)
        tables = [exact_product(self._codes(pos, grid, axis), part) for axis, part in enumerate(parts)]
        terms = read_by_axis(
            pos,
            grid,
            "all offsets",
            tables,
            lambda n: offset_rows(n, pos.coords.device, None, False),
            shift=self.r_r_bias,
        )
        return SumBias(terms) if len(terms) > 1 else terms[0]

    def _codes(self, pos: Positions, grid: Grid, axis: int) -> Tensor:
        """Return R of every offset along an axis, (2 n - 1, width)."""
        step = (self.spacing or grid.spacing or (1.0,) * grid.axes)[axis]
        dtype = torch.promote_types(self.r.dtype, torch.float32)

        def make() -> Tensor:
            # angles in float64: accurate for grids of any size
            n, device = grid.shape[axis], exact_device(pos.coords)
            offset = torch.arange(1 - n, n, device=device, dtype=torch.float64) * step
            if self.clamp_len is not None:
                offset = offset.clamp(-self.clamp_len, self.clamp_len)
            angle = offset[:, None] * self._rates(grid.axes, device)
            return torch.cat([angle.sin(), angle.cos()], -1).to(dtype).to(pos.coords.device)

        return pos.remember((self.name, axis, step, self.temperature, self.clamp_len, self.dim, dtype), make)

    def _rates(self, axes: int, device: torch.device) -> Tensor:
        return inverse_frequencies(self.dim // axes, self.temperature, torch.float64).to(device)

    def _free(self, pos: Positions, parts: Sequence[Tensor]) -> Bias:
        """Return the bias of free coordinates."""
        if self.clamp_len is not None:
            raise ShapeError(
                f"transformer_xl with clamp_len={self.clamp_len:g} needs tokens at the cells of a grid, got "
                f"{pos}. Omit clamp_len for free coordinates."
            )
        coords = (pos if self.spacing is None else pos.with_spacing(self.spacing)).coords
        rates = self._rates(pos.axes, exact_device(coords)).to(coords)
        # (b, n, axes, width / 2) -> (b, n, angles)
        angle = (coords[..., None] * rates).flatten(-2)
        cos, sin = (wave * pos.spatial[..., None] for wave in (angle.cos(), angle.sin()))
        # rows of r are those of sines, then those of cosines, per axis
        of_sin, of_cos = (
            torch.cat(halves, 1) for halves in zip(*(p.chunk(2, 1) for p in parts), strict=True)
        )
        return WaveBias(of_sin, of_cos, cos, sin, self.r_r_bias, pos)
