"""GRAPE-AP: a bias of penalties summed along the path from query to key (arXiv 2512.07805)."""

from __future__ import annotations

import torch
from torch import Tensor

from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.dense import DenseBias
from vispe.attention.precision import at_least_float32
from vispe.encodings.base import Biased
from vispe.encodings.parts.bias.slopes import fixed_slopes
from vispe.encodings.parts.layers import PreciseLinear
from vispe.encodings.parts.rotary.grape_rank2 import path_bias
from vispe.encodings.registry import register
from vispe.errors import ShapeError
from vispe.grid import Positions
from vispe.utils.options import PositiveEvenInt, PositiveFloat, PositiveInt


@register
class GrapePath(Biased):
    """Attention to an earlier token falls off with the content-dependent penalties of all tokens in between.

    bias[t, j] = sum over j < l <= t of slope_h logsigmoid(p_t . rot(p_l) / d_p), p = W_p x          arXiv 2512.07805

    For sequences under a causal mask; entries on and above the diagonal are 0. rot divides by the root mean square and
    rotates by minus the position. Computed in `parts/rotary/grape_rank2.py`.

    Args:
        dim: width of the tokens, d.
        num_heads: heads, h.
        p_dim: channels of p per head, d_p; even.
        base: ratio of the frequencies of rot; 1 rotates all pairs equally, as released.

    Shapes: pos (n, 1), x (b, n, d) -> bias (b, h, n, n); prefix rows and columns are 0.
    New resolution: positions are extrapolated.   Cost: d h d_p parameters per layer, O(n^2 d_p) per head; the bias is
        dense.
    Invariant to: nothing: p_t itself is not rotated, so the bias is not a function of offsets.
    Raises: ShapeError without the tokens x, for other numbers of axes, or if tokens have been dropped, because their
        penalties would be missing from the path.
    Differs from the reference: no -inf above the diagonal; pass is_causal or a mask to attention.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("grape_path", dim=16, num_heads=2)
        >>> encoding.bias(Grid((6,)).positions(), 0, torch.ones(1, 6, 16)).dense().shape
        torch.Size([1, 2, 6, 6])
    """

    name = "grape_path"
    paper = "Group Representational Position Encoding, https://arxiv.org/abs/2512.07805"
    year = 2025
    ndim = (1,)
    encodes = ("position", "content")
    formula = (
        r"b_{tj} = \sum_{j < l \le t} m_h \ln \sigma \left( \frac{p_t \cdot R(p_l)}{d_p} \right), \quad p "
        r"= W_p x"
    )
    tested_options = ("p_dim=4,base=100",)
    reads_tokens = True

    dim: PositiveInt
    num_heads: PositiveInt
    p_dim: PositiveEvenInt = 8
    base: PositiveFloat = 1.0

    def __post_init__(self) -> None:
        self.c_p = PreciseLinear(self.dim, self.num_heads * self.p_dim, bias=False)

    @property
    def per_layer(self) -> bool:
        """True: every layer has its own W_p."""
        return True

    def reset_parameters(self) -> None:
        """Initialise W_p as torch does."""
        self.c_p.reset_parameters()

    def bias(self, pos: Positions, layer: int, x: Tensor | None = None) -> Bias | None:
        """Return the bias for the tokens `x` (b, n, d)."""
        self._need_axes(pos)
        if x is None:
            raise ShapeError("grape_path reads the tokens. Pass x (b, n, d) to bias().")
        # penalties of dropped tokens would be missing on the path
        if pos.index is not None:
            raise ShapeError(
                "grape_path sums over all tokens of a sequence, but some have been dropped. Keep all."
            )
        p = self.c_p(at_least_float32(x))
        # (b, n, h * p) -> (b, h, n, p)
        p = p.reshape(*p.shape[:2], self.num_heads, -1).transpose(1, 2)
        slopes = torch.tensor(fixed_slopes("alibi", self.num_heads), dtype=p.dtype, device=p.device)
        return DenseBias(path_bias(p, pos.coords[..., 0], pos.spatial, slopes, self.base), pos)
