"""GRAPE-AP: a bias that sums penalties along the way from query to key (arXiv 2512.07805)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vispe.attention.bias.base import Bias
from vispe.attention.bias.dense import DenseBias
from vispe.attention.precision import at_least_float32
from vispe.encodings.base import Biased
from vispe.encodings.parts.coords import affine_weight
from vispe.encodings.parts.rank2 import path_bias
from vispe.encodings.parts.slopes import fixed_slopes
from vispe.encodings.registry import register
from vispe.errors import OptionError, ShapeError, is_positive, is_whole
from vispe.grid import Positions


@register
class GrapePath(Biased):
    """Attention to an earlier token falls off with the penalties of all tokens in between, read from the content.

    bias[t, j] = sum over j < l <= t of slope_h logsigmoid(p_t . rot(p_l) / d_p), p = W_p x          arXiv 2512.07805

    For sequences under a causal mask; entries on and above the diagonal are 0. rot divides by the root mean square and
    turns by minus the position.

    Args:
        dim: width of the tokens, d.
        num_heads: heads, h.
        p_dim: channels of p per head, d_p; even.
        base: ratio of the frequencies of rot; 1 turns all pairs alike, as released.

    Shapes: pos (n, 1), x (b, n, d) -> bias (b, h, n, n); prefix rows and columns are 0.
    New resolution: positions go on.   Cost: d h d_p parameters per layer, O(n^2 d_p) per head; the bias is dense.
    Invariant to: nothing: p_t itself is not rotated, so the bias is no function of offsets alone.
    Raises: ShapeError without the tokens x, for other numbers of axes, or when tokens have been dropped, because the
        way then lacks their penalties.
    Differs from the reference: no -inf above the diagonal; pass is_causal or a mask to attention.
    """

    name = "grape_path"
    paper = "Group Representational Position Encoding, https://arxiv.org/abs/2512.07805"
    year = 2025
    ndim = (1,)

    def __init__(self, *, dim: int, num_heads: int, p_dim: int = 8, base: float = 1.0) -> None:
        super().__init__()
        if not is_whole(num_heads) or num_heads < 1:
            raise OptionError(f"grape_path needs at least one head, got num_heads={num_heads!r}.")
        if not is_whole(p_dim) or p_dim < 2 or p_dim % 2 or not is_positive(base):
            raise OptionError(
                f"grape_path needs an even p_dim above 0 and a positive base, got p_dim={p_dim!r}, base={base!r}."
            )
        self.dim, self.num_heads, self.p_dim, self.base = dim, num_heads, p_dim, base
        self.c_p = nn.Linear(dim, num_heads * p_dim, bias=False)

    @property
    def per_layer(self) -> bool:
        """Every layer has its own W_p."""
        return True

    def reset_parameters(self) -> None:
        """Initialise W_p as torch does."""
        self.c_p.reset_parameters()

    def bias(self, pos: Positions, layer: int, x: Tensor | None = None) -> Bias | None:
        """Return the bias for the tokens `x` (b, n, d)."""
        if pos.axes != 1:
            raise ShapeError(f"grape_path needs 1 axis, got {pos.axes} axes ({pos}).")
        if x is None:
            raise ShapeError("grape_path reads the tokens; pass x (b, n, d) to bias().")
        if pos.index is not None:
            raise ShapeError(
                "grape_path sums over all tokens of a sequence, but some have been dropped; keep all."
            )
        p = affine_weight(self.c_p, at_least_float32(x))
        p = p.reshape(*p.shape[:2], self.num_heads, -1).transpose(1, 2)
        prefix = 0 if pos.grid is None else pos.grid.prefix
        slopes = torch.tensor(fixed_slopes("alibi", self.num_heads), dtype=p.dtype, device=p.device)
        dense = path_bias(p[:, :, prefix:], pos.coords[:, prefix:, 0], slopes, self.base)
        return DenseBias(nn.functional.pad(dense, (prefix, 0, prefix, 0)), pos)
