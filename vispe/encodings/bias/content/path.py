"""PaTH: keys are transformed by Householder reflections of all tokens up to the query (arXiv 2505.16381)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.dense_request import DenseRequest
from vispe.attention.precision import at_least_float32, exact_product
from vispe.encodings.base import Biased
from vispe.encodings.parts.bias.scores import ScoreBias
from vispe.encodings.parts.layers import PreciseConv, PreciseLinear, positioned_first, take_tokens
from vispe.encodings.registry import register
from vispe.errors import ShapeError, UnsupportedCombination, counted
from vispe.grid import Positions
from vispe.utils.options import PositiveInt

TAPS = 3  # kernel size of the convolution


@register
class Path(Biased):
    """Logits with keys transformed by content-dependent Householder-like steps of all tokens between key and query.

    logits = scale (q_i^T (I - b_i w_i w_i^T) ... (I - b_{j+1} w_{j+1} w_{j+1}^T) k_j + g_{j+1} + ... + g_i), j <= i

    w = silu(conv(U D x)), of length 1 per head; b = 2 sigmoid(B x + c); g = logsigmoid(G x + e), or none
    arXiv 2505.16381. For sequences only: attention is causal, later keys get -inf.

    Args:
        dim: width of the tokens; its channels per head are d_h.
        num_heads: heads, h.
        head_dim: channels of a head, d_h; dim / num_heads by default.
        causal: must be true: the method is not defined for bidirectional attention.
        rank: width between D and U; the depthwise causal convolution covers 3 tokens.
        gate: whether there is a forget gate g.

    Shapes: pos (n, 1), x (b, n, d), q and k (b, h, n, d_h) -> logits (b, h, n, n); pairs with a prefix token keep
        scale q . k, and prefix tokens transform no key.
    New resolution: longer sequences are extrapolated.
    Cost: 2 d rank + 3 d + (h or 2 h) (d + 1) parameters per layer; three more products of n x n and a triangular system
        of n unknowns per head; the logits are dense.
    Invariant to: nothing; if a segment of tokens moves, the steps of its first two tokens change.
    Raises: UnsupportedCombination without causal=true; ShapeError without the tokens x, without queries and keys, for
        other numbers of axes, or if tokens have been dropped, because their steps would be missing.
    Differs from the reference: all pairs at once, by one triangular system, instead of blocks. No initialisation
        leaves a pretrained model unchanged.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("path(causal=true)", dim=16, num_heads=2)
        >>> q = torch.ones(1, 2, 6, 8)
        >>> encoding.bias(Grid((6,)).positions(), 0, torch.ones(1, 6, 16)).dense(q=q, k=q).shape
        torch.Size([1, 2, 6, 6])
    """

    name = "path"
    paper = "PaTH Attention: Position Encoding via Accumulating Householder Transformations, https://arxiv.org/abs/2505.16381"
    year = 2025
    ndim = (1,)
    encodes = ("direction", "content")
    formula = (
        r"a_{ij} = s \left( q_i^\top (I - \beta_i w_i w_i^\top) \cdots (I - \beta_{j+1} w_{j+1} "
        r"w_{j+1}^\top) \, k_j + g_{j+1} + \ldots + g_i \right)"
    )
    tested_options = ("causal=true,gate=true,rank=5",)
    reads_tokens = True

    dim: PositiveInt
    num_heads: PositiveInt
    head_dim: PositiveInt | None = None
    causal: bool = False
    rank: PositiveInt = 32
    gate: bool = False

    def __post_init__(self) -> None:
        inner = self.num_heads * self._resolve_head_dim()
        if not self.causal:
            raise UnsupportedCombination(
                "path transforms keys by later tokens and cannot be used in bidirectional attention. Use "
                "causal=true if attention is causal, or grape_alibi."
            )
        self.down = PreciseLinear(self.dim, self.rank, bias=False)
        self.up = PreciseLinear(self.rank, inner, bias=False)
        self.conv = PreciseConv(1, inner, inner, TAPS, groups=inner, bias=False)
        self.beta = PreciseLinear(self.dim, self.num_heads)
        self.forget = PreciseLinear(self.dim, self.num_heads) if self.gate else None

    @property
    def per_layer(self) -> bool:
        """True: every layer has its own steps."""
        return True

    def reset_parameters(self) -> None:
        """Initialise all layers as torch does."""
        for layer in self.children():
            if isinstance(layer, PreciseLinear | PreciseConv):
                layer.reset_parameters()

    def bias(self, pos: Positions, layer: int, x: Tensor | None = None) -> Bias | None:
        """Return the logits for the tokens `x` (b, n, d); `dense` depends on queries and keys."""
        if pos.axes != 1:
            raise ShapeError(
                f"path needs 1-axis positions, got {counted(pos.axes, 'axis')} ({pos}). Use tapa or grape_alibi on "
                "grids."
            )
        if x is None:
            raise ShapeError("path reads the tokens. Pass x (b, n, d) to bias().")
        if pos.index is not None:
            raise ShapeError("path needs all tokens of a sequence, but some have been dropped. Keep all.")
        # tokens without a position make no step
        valid = pos.spatial[..., None]
        x = at_least_float32(x) * valid
        beta = 2 * self.beta(x).sigmoid() * valid
        forget = None if self.forget is None else (F.logsigmoid(self.forget(x)) * valid).transpose(1, 2)
        return PathScores(pos, self._directions(x, pos), beta.transpose(1, 2), forget)

    def _directions(self, x: Tensor, pos: Positions) -> Tensor:
        """Return the directions w (b, h, n, d_h), of length 1."""
        orders = positioned_first(pos)
        if orders is None:
            return self._steps(x)
        order, back = orders
        return take_tokens(self._steps(take_tokens(x, order)), back)

    def _steps(self, x: Tensor) -> Tensor:
        """Return the directions of consecutive tokens."""
        wide = F.pad(self.up(self.down(x)), (0, 0, TAPS - 1, 0))
        # explicit sum over taps: a convolution would round under autocast
        taps = self.conv.weight[:, 0].to(wide.dtype).unbind(-1)
        mixed = sum(
            (wide[:, i : i + x.shape[1]] * tap for i, tap in enumerate(taps)), torch.zeros_like(wide[:, :1])
        )
        heads = F.silu(mixed).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        return F.normalize(heads, dim=-1)


class PathScores(ScoreBias):
    """The logits of `Path`.

    Args:
        pos: positions along one axis.
        steps: w (b, h or h_kv, n, d_h), of length 1.
        beta: b (b, h or h_kv, n).
        forget: g (b, h, n), or None.
    """

    __slots__ = ("beta", "forget", "steps")
    of = "path"

    def __init__(self, pos: Positions, steps: Tensor, beta: Tensor, forget: Tensor | None = None) -> None:
        super().__init__(pos)
        self.steps, self.beta, self.forget = steps, beta, forget

    def scores(
        self, q: Tensor, k: Tensor, scale: float, pos_q: Positions, pos_k: Positions, request: DenseRequest
    ) -> Tensor:
        """Return the logits (b, h, n, n); those of later keys are undefined."""
        heads = q.shape[1] if request.q is None else request.q.shape[1]
        # steps of key heads are shared by groups of query heads
        groups = heads // self.steps.shape[1]
        w, beta = (
            at_least_float32(request.pick(t.repeat_interleave(groups, 1), 1)) for t in (self.steps, self.beta)
        )
        wt, beta = w.transpose(-1, -2), beta[..., None]
        # token t transforms a key by a_t w_t: a = b (w . k - sum over s < t of (w_t . w_s) a_s), for all keys at once
        steps = torch.eye(w.shape[-2], dtype=w.dtype, device=w.device) + beta * (w @ wt).tril(-1)
        after = beta * exact_product(w, k.transpose(-1, -2)).tril(-1)
        amounts = torch.linalg.solve_triangular(steps, after, upper=False, unitriangular=True)
        # a query includes the steps up to its own
        logits = q @ k.transpose(-1, -2) - exact_product(exact_product(q, wt).tril(), amounts)
        if self.forget is not None:
            upto = at_least_float32(request.pick(self.forget, 1)).cumsum(-1)
            # log gates after j up to i, as a difference of cumulative sums
            logits = logits + (upto[..., :, None] - upto[..., None, :])
        return scale * logits

    def _dense(self, request: DenseRequest) -> Tensor:
        dense = super()._dense(request)
        later = torch.ones(dense.shape[-2:], dtype=torch.bool, device=dense.device).triu(1)
        return dense.masked_fill(later, float("-inf"))
