"""2D-TPE: attention in row-major and in column-major order, mixed per head (arXiv 2409.19700)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from vispe.attention.bias.dense import DenseBias
from vispe.attention.precision import at_least_float32
from vispe.attention.transform.pairs import PairRotation
from vispe.encodings.base import Rotary
from vispe.encodings.multi_softmax import Branch
from vispe.encodings.parts.layers import PreciseLinear
from vispe.encodings.registry import register
from vispe.errors import OptionError, ShapeError
from vispe.grid import Positions
from vispe.grid.frequencies import inverse_frequencies
from vispe.utils.options import PositiveFloat, PositiveInt


@register
class TPE2D(Rotary):
    """Attends twice, with RoPE in row-major and column-major order, with learned gates per token and head.

    out = sum_o g_o(i) softmax(R(r_o(i)) q_i . R(r_o(j)) k_j / sqrt(d_h)) v_j, r_o the rank of a cell in order o

    g = softmax(W_3 (silu(W_1 x) * W_2 x)) over both orders, x the channels of the head in the layer's input
    arXiv 2409.19700. R rotates channels c and c + d_h / 2 by rank * temperature^(-2 c / d_h).

    Designed for tables of text. In images, ranks jump at the end of each row; `rope_axial` uses both coordinates.

    Args:
        dim: width of the tokens.
        num_heads: heads, h; d_h must be even.
        head_dim: channels of a head, d_h; dim / num_heads by default.
        gate_dim: hidden width of the gates, rows of W_1 and W_2; d_h by default.
        temperature: ratio of the frequencies.
        causal: whether tokens attend only to previous ones in each order, as in the released language models; tokens
            without a position come before all others, in their own order.

    Shapes: pos (n, 2) of a grid, x (b, n, d) -> two branches with gates (b, h, n, 1); prefix tokens are not rotated.
    New resolution: ranks are extrapolated; the rank of a cell differs between grids.   Cost: twice the attention;
        gate_dim (2 d_h + 2) parameters per layer, shared by heads.
    Invariant to: translation inside a grid, when patches keep their content.
    Raises: ShapeError without the tokens x or the cells of a 2-axis grid; OptionError for an odd head_dim.
    Differs from the reference: bidirectional attention unless causal; the loss on the entropy of the gates is left
        to training, see `gates`. Pretrained models need retraining.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("tpe2d", dim=16, num_heads=2)
        >>> [b.gate.shape for b in encoding.branches(Grid((2, 3)).positions(), 0, torch.ones(1, 6, 16))]
        [torch.Size([1, 2, 6, 1]), torch.Size([1, 2, 6, 1])]
    """

    name = "tpe2d"
    paper = "2D-TPE: Two-Dimensional Positional Encoding Enhances Table Understanding, https://arxiv.org/abs/2409.19700"
    year = 2024
    encodes = ("distance", "direction", "content")
    reads_tokens = True
    invariant = ("translation",)
    formula = (
        r"o_i = \sum_o g_o(i) \sum_j \operatorname{softmax}_j \left( \frac{R(r_o(i)) q_i \cdot R(r_o(j)) "
        r"k_j}{\sqrt{d_h}} \right) v_j"
    )
    tested_options = ("gate_dim=5,temperature=100", "causal=true")
    multi_softmax = True

    dim: PositiveInt
    num_heads: PositiveInt
    head_dim: PositiveInt | None = None
    gate_dim: PositiveInt | None = None
    temperature: PositiveFloat = 10000.0
    causal: bool = False

    def __post_init__(self) -> None:
        self.width = self._resolve_head_dim()
        if self.width % 2:
            raise OptionError(
                f"tpe2d needs an even head_dim, got {self.width} (dim={self.dim}, "
                f"num_heads={self.num_heads}). Choose another num_heads."
            )
        part = self._token_part()
        inner = self.gate_dim or part
        self.gate_1 = PreciseLinear(part, inner, bias=False)
        self.gate_2 = PreciseLinear(part, inner, bias=False)
        self.gate_3 = PreciseLinear(inner, 2, bias=False)

    @property
    def per_layer(self) -> bool:
        """True: every layer has its own gates."""
        return True

    def reset_parameters(self) -> None:
        """Initialise the gates as torch does."""
        for layer in self.children():
            if isinstance(layer, PreciseLinear):
                layer.reset_parameters()

    def gates(self, x: Tensor) -> Tensor:
        """Return the weights of both orders, (b, h, n, 2), for the tokens `x` (b, n, d)."""
        # (b, n, d) -> (b, h, n, d / h)
        heads = at_least_float32(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        inner = F.silu(self.gate_1(heads)) * self.gate_2(heads)
        return self.gate_3(inner).softmax(-1)

    def branches(self, pos: Positions, layer: int, x: Tensor | None = None) -> list[Branch]:
        """Return one branch for the row-major and one for the column-major order."""
        self._need_grid(pos, "Its ranks count the cells of the grid.")
        if x is None:
            raise ShapeError("tpe2d reads the tokens. Pass x (b, n, d) to branches().")
        gates = self.gates(x).unbind(-1)
        key = (self.name, self.width, self.temperature, self.causal)
        orders = pos.remember(key, lambda: [self._order(pos, axis) for axis in (0, 1)])
        return [
            Branch(
                # (b, h, n) -> (b, h, n, 1), one weight per query
                gate[..., None],
                PairRotation(cos, sin, "half"),
                None if mask is None else DenseBias(mask, pos),
            )
            for gate, (cos, sin, mask) in zip(gates, orders, strict=True)
        ]

    def _order(self, pos: Positions, slow: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return cosines, sines and mask of the order in which axis `slow` varies slowest."""
        cells, grid = pos.cells(), self._need_grid(pos)
        rank = cells[..., slow] * grid.shape[1 - slow] + cells[..., 1 - slow]
        # tokens without a position have cell 0, so they are not rotated
        rates = inverse_frequencies(self.width, self.temperature, torch.float64).to(pos.coords)
        # (b or 1, n) -> (b or 1, 1, n, pairs)
        angle = (rank[..., None].to(pos.coords.dtype) * rates)[:, None]
        if not self.causal:
            return angle.cos(), angle.sin(), None
        # negative ranks for tokens without a position: they precede all others
        count = torch.arange(pos.tokens, device=rank.device) - pos.tokens
        rank = torch.where(pos.spatial, rank, count)
        # of shape (b or 1, 1, queries, keys)
        later = rank[:, None, None] > rank[:, None, :, None]
        mask = torch.zeros(later.shape, device=rank.device).masked_fill(later, float("-inf"))
        return angle.cos(), angle.sin(), mask
