"""TAPE: a transformer block whose position tables change with the content of the tokens (arXiv 2501.00712)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vispe.attention import attention
from vispe.attention.precision import at_least_float32
from vispe.encodings.parts.layers import PreciseLinear
from vispe.encodings.parts.rope import axial_angles, pair_counts
from vispe.errors import OptionError, ShapeError
from vispe.grid import Grid, Positions
from vispe.grid.frequencies import inverse_frequencies
from vispe.options import Number, Positive, Whole, checked

Activation = Literal["silu", "gelu", "relu"]


@checked
def tape_state(
    where: Positions | Grid | Sequence[int],
    *,
    num_heads: Whole,
    head_dim: Whole,
    temperature: Positive = 10000.0,
    shift: Number = 0.0,
) -> Tensor:
    """Return the tables that a stack of `TapeBlock` starts with: cosines and sines of axial RoPE, for every head.

    Args:
        where: positions of the tokens, on their device; their grid, or its bare shape where there are no prefix tokens.
        num_heads: heads, h.
        head_dim: their width d_h, even; channel c is the partner of c + d_h / 2. Pairs are shared out evenly to the
            axes, first axis first; what is left over does not turn.
        temperature: ratio of the frequencies of an axis.
        shift: added to all coordinates, in patches. The authors draw it in training, from 0 to twice the largest.

    Returns:
        (2, b or 1, h, n, d_h), cosines first; 1 and 0 for tokens without a place.

    Example:
        >>> tape_state((2, 3), num_heads=2, head_dim=8).shape
        torch.Size([2, 1, 2, 6, 8])
    """
    if head_dim % 2:
        raise OptionError(f"tape_state turns pairs of channels, got head_dim={head_dim}; choose an even one.")
    pos = where if isinstance(where, Positions) else None
    if pos is None:
        pos = (where if isinstance(where, Grid) else Grid(tuple(where))).positions()
    pairs = head_dim // 2
    counts = pair_counts("tape_state", None, pairs, pos.axes)
    freqs = [inverse_frequencies(2 * n, temperature, torch.float64)[None] for n in counts]
    angle = axial_angles(pos.coords + shift * pos.cell[:, None], freqs, range(pos.axes), pairs)
    angle = (angle * pos.spatial[:, None, :, None]).repeat(1, num_heads, 1, 2)
    return torch.stack([angle.cos(), angle.sin()])


class TapeBlock(nn.Module):
    """A transformer block that turns queries and keys by tables which it then changes, for the block after it.

    x' = x + O(A v), A the weights of q, k turned by e;  e' = e + s_h A e;  m = MLP(norm(x'))      arXiv 2501.00712

    e'' = e' + W_down(act(W_gate m) * W_up e') along the heads, x'' = x' + m. e are the cosines and sines that
    `tape_state` starts with; s and W_up are 0 at first, so a new stack has plain RoPE, and W_down waits for W_up.

    Args:
        dim: width of the tokens, d.
        num_heads: heads, h; divides dim into even widths.
        hidden: width of the gated MLP, 4 d by default.
        position_size: rows of W_up and W_gate, twice the heads by default.
        act: activation of both gates: 'silu', 'gelu' or 'relu'.
        eps: of the root mean square norms.
        causal: whether a token sees only itself and those before it.
        backend: who computes attention: 'auto', or a name of `vispe.attention`; fused kernels serve it.

    Shapes: x (b, n, d), state (2, b or 1, h, n, d / h) -> the same two.

    Cost: 2 b n d more numbers for every block, and attention with values three times as wide.

    Differs from the reference: s is one number per head, since of its matrix only the sums of rows have an effect;
        grids of 1 to 3 axes; no cache, and as many key heads as query heads. It is no encoding for `vispe.convert`,
        whose hosts have no way to hand tables from block to block.

    Raises:
        OptionError: an option is not accepted, or heads have no even width.
        ShapeError: the tables are not those of the tokens.

    Example:
        >>> import torch
        >>> blocks = [TapeBlock(dim=16, num_heads=2) for _ in range(2)]
        >>> x, state = torch.randn(4, 6, 16), tape_state((2, 3), num_heads=2, head_dim=8)
        >>> for block in blocks:
        ...     x, state = block(x, state)
        >>> x.shape, state.shape
        (torch.Size([4, 6, 16]), torch.Size([2, 4, 2, 6, 8]))
    """

    @checked
    def __init__(
        self,
        *,
        dim: Whole,
        num_heads: Whole,
        hidden: Whole | None = None,
        position_size: Whole | None = None,
        act: Activation = "silu",
        eps: Positive = 1e-6,
        causal: bool = False,
        backend: Any = "auto",
    ) -> None:
        super().__init__()
        if dim % (2 * num_heads):
            raise OptionError(
                f"TapeBlock needs dim to be a multiple of twice num_heads, got dim={dim}, num_heads={num_heads}."
            )
        self.num_heads, self.causal, self.backend = num_heads, causal, backend
        self.act = getattr(F, act)
        hidden, size = hidden or 4 * dim, position_size or 2 * num_heads
        self.norm1, self.norm2 = nn.RMSNorm(dim, eps=eps), nn.RMSNorm(dim, eps=eps)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim, bias=False)
        self.mlp_gate = nn.Linear(dim, hidden, bias=False)
        self.mlp_up = nn.Linear(dim, hidden, bias=False)
        self.mlp_down = nn.Linear(hidden, dim, bias=False)
        self.state_gain = nn.Parameter(torch.zeros(num_heads))
        self.state_up = PreciseLinear(num_heads, size, bias=False)
        self.state_gate = nn.Linear(dim, size, bias=False)
        self.state_down = PreciseLinear(size, num_heads, bias=False)
        nn.init.zeros_(self.state_up.weight)

    def forward(
        self,
        x: Tensor,
        state: Tensor,
        *,
        attn_mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the tokens and the tables after this block, the tables in float32 or better.

        Args:
            x: tokens (b, n, d), prefix tokens first.
            state: tables of `tape_state` or of the block before.
            attn_mask: bool (True = attend) or additive float, broadcastable to (b, h, n, n).
            key_padding_mask: bool (b, n), True = a real key.
        """
        heads, width = self.num_heads, x.shape[-1] // self.num_heads
        wanted = 2, len(x), heads, x.shape[1], width
        if state.ndim != 5 or state.shape[1] not in (1, len(x)) or (2, *state.shape[2:]) != (2, *wanted[2:]):
            raise ShapeError(
                f"TapeBlock needs a state {wanted} for x {tuple(x.shape)}, got {tuple(state.shape)}."
            )
        state = at_least_float32(state).expand(wanted)
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, heads, width)).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        # the tables ride along as values: one pass averages content and places with the same weights
        both = torch.cat([v, *state.to(v.dtype).unbind(0)], -1)
        out = attention(
            _turned(q, state),
            _turned(k, state),
            both,
            attn_mask=attn_mask,
            key_padding_mask=key_padding_mask,
            is_causal=self.causal,
            backend=self.backend,
        )
        content, *places = out.split(width, -1)
        x = x + self.proj(content.transpose(1, 2).flatten(2))
        state = state + at_least_float32(self.state_gain)[:, None, None] * torch.stack(places)
        h = self.norm2(x)
        h = self.mlp_down(self.act(self.mlp_gate(h)) * self.mlp_up(h))
        return x + h, state + self._change(h, state)

    def _change(self, h: Tensor, state: Tensor) -> Tensor:
        """Return what the output of the MLP (b, n, d) changes in the tables, mixed across heads."""
        gate = self.act(at_least_float32(self.state_gate(h))).transpose(1, 2)[..., None]
        # heads last, for the two maps along them
        up = self.state_up(state.movedim(2, -1)).movedim(-1, 2)
        return self.state_down((gate * up).movedim(2, -1)).movedim(-1, 2)


def _turned(x: Tensor, state: Tensor) -> Tensor:
    """Return x (b, h, n, d_h) turned by tables whose halves need not agree, in its dtype."""
    cos, sin = state.unbind(0)
    first, second = x.chunk(2, -1)
    return (x * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)
