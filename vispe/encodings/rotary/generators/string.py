"""STRING with circulant generators: commuting rotations of blocks of channels (arXiv 2502.02562)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from vispe.attention.precision import at_least_float32, exact_product
from vispe.attention.transform.abstract_transform import Transform
from vispe.attention.transform.blocks import BlockTransform
from vispe.encodings.base import Rotary
from vispe.encodings.registry import register
from vispe.errors import OptionError, counted
from vispe.grid import Positions
from vispe.utils.options import Axes, NonNegativeFloat, PositiveInt, Spacing, check_per_axis


@register
class String(Rotary):
    """Rotates blocks of query and key channels by exponentials of circulant matrices, which commute.

    q' = R(p) q, k' = R(p) k, R(p) = exp(sum_a p_a (C_a - C_a^T)), C_a[i, j] = c_a[(i - j) mod s]    arXiv 2502.02562

    R(p) is circulant too: Fourier mode k across the channels of a block rotates by -2 sum_a p_a sum_m g_a[m] sin(2 pi
    k m / s), with g[m] = c[m] - c[s - m] and m < s / 2. So this is RoPE with learned frequencies in a fixed basis.

    Args:
        dim: width of the tokens; its channels per head are d_h.
        num_heads: heads, h.
        head_dim: channels of a head, d_h; dim / num_heads by default.
        axes: number of axes, 1 to 3.
        block: channels per block, s, 3 or more; 16 by default, or d_h if that is less. Channels beyond a multiple of it
            pass unchanged.
        std: initial standard deviation of g; 0 starts as the identity, and is still trainable.
        spacing: distance between neighbouring patches per axis, instead of `Grid.spacing`.

    Shapes: pos (n, axes) -> matrices (1 or b, h, n, blocks, s, s). The mean of a block and, for even s, its alternating
        sum are never rotated.
    New resolution: coordinates are extrapolated, in patches.
    Cost: h axes blocks floor((s - 1) / 2) parameters per layer; n d_h s products per head for q and for k.
    Invariant to: translation in scores between patches; norms are preserved.
    Raises: ShapeError if `pos` has other axes; OptionError for blocks that are wider than a head.
    Differs from the reference: only g is a parameter, because the rest of c has no effect; only the circulant form,
        since the outer matrices of the Cayley form cancel in scores.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("string", dim=16, num_heads=2)
        >>> encoding.transform(Grid((2, 3)).positions(), 0).query(torch.ones(1, 2, 6, 8)).shape
        torch.Size([1, 2, 6, 8])
    """

    name = "string"
    paper = "Learning the RoPEs: Better 2D and 3D Position Encodings with STRING, https://arxiv.org/abs/2502.02562"
    year = 2025
    ndim = (1, 2, 3)
    encodes = ("distance", "direction")
    invariant = ("translation",)
    formula = (
        r"q' = R(p) \, q, \quad k' = R(p) \, k, \quad R(p) = \exp \Big( \sum_a p_a \left( C_a - C_a^\top "
        r"\right) \Big)"
    )
    tested_options = ("block=3,axes=1,std=0.5", "block=4,axes=3", "block=7,spacing=[2,0.5]")

    dim: PositiveInt
    num_heads: PositiveInt
    head_dim: PositiveInt | None = None
    axes: Axes = 2
    block: PositiveInt | None = None
    std: NonNegativeFloat = 0.02
    spacing: Spacing | None = None

    def __post_init__(self) -> None:
        head = self._resolve_head_dim()
        self.width = min(16, head) if self.block is None else self.block
        if not 3 <= self.width <= head:
            raise OptionError(
                f"string needs a block of 3 to {head} channels for {counted(head, 'channel')} per head, got "
                f"block={self.block}. Smaller blocks contain no rotation."
            )
        check_per_axis("spacing", self.spacing, self.axes)
        self._accept(self.axes)
        shape = self.num_heads, head // self.width, self.axes, (self.width - 1) // 2
        self.odd = nn.Parameter(torch.empty(shape))
        self.reset_parameters()

    @property
    def per_layer(self) -> bool:
        """True: every layer has its own generators."""
        return True

    def reset_parameters(self) -> None:
        """Draw g from a normal distribution."""
        nn.init.normal_(self.odd, std=self.std)

    def transform(self, pos: Positions, layer: int, x: Tensor | None = None) -> Transform:
        """Return the rotation of queries and keys, by the same matrix per token."""
        self._need_axes(pos)
        turn = self._eval_cache(self, pos, lambda: self.rotations(pos))
        return BlockTransform(q=turn, k=turn)

    def rotations(self, pos: Positions) -> Tensor:
        """Return the rotation matrices (b or 1, h, n, blocks, s, s), float32 or better."""
        scaled = pos if self.spacing is None else pos.with_spacing(self.spacing)
        odd, size = at_least_float32(self.odd), self.width
        # angles k m / s of the Fourier basis, reduced in integers before anything is rounded
        number = torch.arange(size, device=odd.device)
        turns = (number[:, None] * number % size).to(torch.promote_types(odd.dtype, scaled.coords.dtype))
        cos, sin = (turns * (2 * math.pi / size)).cos(), (turns * (2 * math.pi / size)).sin()
        # the eigenvalues of the generators, (h, axes, blocks, s), and by how much each wave of a token has turned
        rates = -2 * exact_product(odd, sin[1 : odd.shape[-1] + 1]).transpose(1, 2)
        angle = exact_product(scaled.coords[:, None], rates.flatten(2)).unflatten(-1, (-1, size))
        # back to channels: the first column of R(p), of which every other is a cyclic shift
        column = (exact_product(angle.cos(), cos) - exact_product(angle.sin(), sin)) / size
        shift = (number[:, None] - number) % size
        matrix = column[..., shift.flatten()].unflatten(-1, (size, size))
        # exactly the identity for tokens without a position
        eye = torch.eye(size, dtype=matrix.dtype, device=matrix.device)
        return torch.where(pos.spatial[:, None, :, None, None, None], matrix, eye)
