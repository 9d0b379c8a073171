"""GRAPE-M: rotations of queries and keys with learned frequencies or learned planes (arXiv 2512.07805)."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from vispe.attention.precision import at_least_float32
from vispe.attention.transform.abstract_transform import Transform
from vispe.attention.transform.blocks import BlockTransform
from vispe.attention.transform.pairs import PairRotation
from vispe.encodings.base import Rotary
from vispe.encodings.parts.rotary.grape_rank2 import rank2_rotation
from vispe.encodings.registry import register
from vispe.errors import OptionError, ShapeError, counted
from vispe.grid import Positions
from vispe.utils.options import PositiveFloat, PositiveInt

Planes = Literal["canonical", "rank2"]


@register
class Grape(Rotary):
    """Rotates queries and keys by their position, with learned frequencies or in learned planes.

    q_i, k_i -> G(p_i) q_i, G(p_i) k_i, G(p) = product over axes of exp(p_axis L_axis)          arXiv 2512.07805

    'canonical': L rotates the pairs (c, c + d_h/2) by -f_c, with learned f_c = exp(log_freq_c / scale) that start at
    base^(-2c/d_h); pair c belongs to axis c mod axes. 'rank2': each axis has a block of d_h / axes channels
    and in it one learned plane, L = a b^T - b a^T; planes of different axes are disjoint, so all G commute.

    Args:
        dim: width of the tokens, d.
        num_heads: heads, h.
        head_dim: channels of a head, d_h; dim / num_heads by default.
        planes: 'canonical' or 'rank2'.
        base: ratio of the first to the (C + 1)-th frequency; with 'rank2', frequencies are divided among the heads.
        shared: whether heads share the frequencies; only for canonical planes.
        scale: factor of the stored log-frequencies, which divides the effective step size of the optimizer;
            only for canonical planes.

    Presets: ``grape.text`` has the base of the released language models, 10000.

    Shapes: pos (n, axes) -> rotations of (b, h, n, d_h); prefix tokens are not rotated.
    New resolution: coordinates are extrapolated.   Cost: as RoPE; 'rank2' has one matrix per token, head and axis.
    Invariant to: translation: logits depend on offsets only; norms of queries and keys.
    Raises: ShapeError if head_dim is too small for the axes, or with 'rank2' not a multiple of them.
    Differs from the reference: the reference has one axis, where both are equal; base 100 by default, for grids of tens
        of patches; half-precision parameters are rounded like all others (in the reference they remain in float32),
        but computed in float32. The context-dependent phases ('ctx') need an order of the tokens and are omitted.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("grape", dim=16, num_heads=2)
        >>> encoding.transform(Grid((2, 3)).positions(), 0).query(torch.ones(1, 2, 6, 8)).shape
        torch.Size([1, 2, 6, 8])
    """

    name = "grape"
    paper = "Group Representational Position Encoding, https://arxiv.org/abs/2512.07805"
    year = 2025
    ndim = (1, 2, 3)
    encodes = ("distance", "direction")
    invariant = ("translation",)
    formula = r"q_i \to G(p_i) \, q_i, \quad k_j \to G(p_j) \, k_j, \quad G(p) = \prod_a \exp(p_a L_a)"
    tested_options = ("planes=rank2", "shared=false", "base=10000,scale=1")
    presets: ClassVar[dict[str, dict[str, Any]]] = {"text": {"base": 10000.0}}

    dim: PositiveInt
    num_heads: PositiveInt
    head_dim: PositiveInt | None = None
    planes: Planes = "canonical"
    base: PositiveFloat = 100.0
    shared: bool = True
    scale: PositiveFloat = 16.0

    def __post_init__(self) -> None:
        width, rank2 = self._resolve_head_dim(), self.planes == "rank2"
        if rank2 and not (self.shared and self.scale == 16.0):
            raise OptionError(
                "shared and scale have no effect with planes='rank2', which has no frequencies. Omit them."
            )
        # numbers of axes for which head_dim is large enough
        self._accept(*(n for n in (1, 2, 3) if width >= 2 * n and not (rank2 and width % n)))
        # vectors of all axes, concatenated: d_h / axes channels each
        if rank2:
            self.a = nn.Parameter(torch.empty(self.num_heads, width))
            self.b = nn.Parameter(torch.empty(self.num_heads, width))
        elif width % 2:
            what = "dim / num_heads = " if self.head_dim is None else "head_dim="
            raise OptionError(f"grape needs an even head_dim, got {what}{width}.")
        else:
            heads = () if self.shared else (self.num_heads,)
            self.log_freq = nn.Parameter(torch.empty(*heads, width // 2))
        self.reset_parameters()

    @property
    def per_layer(self) -> bool:
        """True: every layer learns its own rotations."""
        return True

    def reset_parameters(self) -> None:
        """Set the initial frequencies, or draw random planes with a frequency per head."""
        with torch.no_grad():
            if self.planes == "canonical":
                pairs = self.log_freq.shape[-1]
                # the inverse of `frequencies`: exp(log_freq / scale) = base^(-c / pairs)
                step = -math.log(self.base) * self.scale / pairs
                self.log_freq.copy_(torch.arange(pairs, device=self.log_freq.device) * step)
                return
            width = self.a.shape[1]
            powers = torch.arange(self.num_heads, device=self.a.device) / self.num_heads
            # E |a|^2 = E |b|^2 = base^(-i / h) for head i
            size = (self.base**-powers / width).sqrt()[:, None]
            self.a.normal_().mul_(size)
            self.b.normal_().mul_(size)

    def frequencies(self) -> Tensor:
        """Return the frequency of every pair, (pairs,) or (h, pairs), in float32 or better."""
        return (at_least_float32(self.log_freq) / self.scale).exp()

    def transform(self, pos: Positions, layer: int, x: Tensor | None = None) -> Transform:
        """Return the rotations of all tokens."""
        coords = pos.coords * pos.spatial[..., None]
        width, axes = self._resolve_head_dim(), pos.axes
        if axes not in self.ndim:
            raise ShapeError(
                f"grape needs heads of 2 or more channels for each of {counted(axes, 'axis')}, all equally with "
                f"planes='rank2', got head_dim={width} with planes={self.planes!r}."
            )
        if self.planes == "rank2":
            matrices = self._eval_cache(self, pos, lambda: self._blocks(coords, axes))
            return BlockTransform(q=matrices, k=matrices)
        return PairRotation(*self._eval_cache(self, pos, lambda: self._tables(coords, axes)), "half")

    def _blocks(self, coords: Tensor, axes: int) -> Tensor:
        # (h, d_h) -> (1, h, 1, axes, d_h / axes)
        a, b = (at_least_float32(t).reshape(1, self.num_heads, 1, axes, -1) for t in (self.a, self.b))
        return rank2_rotation(a, b, coords[:, None])

    def _tables(self, coords: Tensor, axes: int) -> tuple[Tensor, Tensor]:
        rates = self.frequencies()
        axis = torch.arange(self._resolve_head_dim() // 2, device=coords.device) % axes
        # of shape (b or 1, 1 or h, n, pairs)
        angle = coords.index_select(-1, axis)[:, None] * (rates if self.shared else rates[:, None])
        # rotates by minus the angle, see the class docstring
        return angle.cos(), -angle.sin()
