"""TAPE: transformer block with position tables that are updated from token content (arXiv 2501.00712)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vispe.attention import attention
from vispe.attention.precision import at_least_float32
from vispe.encodings.parts.layers import PreciseLinear
from vispe.encodings.parts.rotary.rope.axial_pairs import axial_angles, pair_counts
from vispe.errors import OptionError, ShapeError
from vispe.grid import Grid, Positions
from vispe.grid.frequencies import inverse_frequencies
from vispe.utils.options import FiniteFloat, PositiveFloat, PositiveInt, checked

Activation = Literal["silu", "gelu", "relu"]


@checked
def tape_state(
    where: Positions | Grid | Sequence[int],
    *,
    num_heads: PositiveInt,
    head_dim: PositiveInt,
    temperature: PositiveFloat = 10000.0,
    shift: FiniteFloat = 0.0,
) -> Tensor:
    """Return the initial tables of a stack of `TapeBlock`: cosines and sines of axial RoPE per head.

    Args:
        where: positions of the tokens, on their device; their grid, or its shape if there are no prefix tokens.
        num_heads: heads, h.
        head_dim: channels of a head d_h, even; channel c is paired with c + d_h / 2. Pairs are divided evenly among
            the axes, first axis first; remaining pairs are not rotated.
        temperature: ratio of the frequencies of an axis.
        shift: added to all coordinates, in patches. The authors draw it in training, from 0 to twice the largest
            coordinate.

    Returns:
        (2, b or 1, h, n, d_h), cosines first; 1 and 0 for tokens without a position.

    Raises:
        OptionError: head_dim is odd.

    Example:
        >>> tape_state((2, 3), num_heads=2, head_dim=8).shape
        torch.Size([2, 1, 2, 6, 8])
    """
    if head_dim % 2:
        raise OptionError(
            f"tape_state needs an even head_dim, got head_dim={head_dim}. RoPE rotates pairs of channels."
        )
    pos = where if isinstance(where, Positions) else None
    if pos is None:
        pos = (where if isinstance(where, Grid) else Grid(tuple(where))).positions()
    pairs = head_dim // 2
    counts = pair_counts("tape_state", None, pairs, pos.axes)
    freqs = [inverse_frequencies(2 * n, temperature, torch.float64)[None] for n in counts]
    angle = axial_angles(pos.coords + shift * pos.cell[:, None], freqs, range(pos.axes), pairs)
    # (b or 1, 1, n, pairs) -> (b or 1, h, n, d_h); both channels of a pair have the same angle
    angle = (angle * pos.spatial[:, None, :, None]).repeat(1, num_heads, 1, 2)
    return torch.stack([angle.cos(), angle.sin()])


class TapeBlock(nn.Module):
    """Transformer block that rotates queries and keys by position tables and updates these tables for the next block.

    x' = x + O(A v), A the weights of q, k rotated by e;  e' = e + s_h A e;  m = MLP(norm(x'))      arXiv 2501.00712

    e'' = e' + W_down(act(W_gate m) * W_up e') along the heads, x'' = x' + m. e are the tables (cosines and sines) of
    `tape_state`; s and W_up are initialised with 0, so a new stack is plain RoPE until W_up is trained.

    Args:
        dim: width of the tokens, d.
        num_heads: heads, h; dim / num_heads is even.
        hidden: width of the gated MLP, 4 d by default.
        position_size: rows of W_up and W_gate, twice the heads by default.
        act: activation of both gates: 'silu', 'gelu' or 'relu'.
        eps: epsilon of the RMS norms.
        causal: whether a token attends only to itself and previous tokens.
        backend: attention backend: 'auto', or a backend name of `vispe.attention`; fused kernels support it.

    Shapes: x (b, n, d), state (2, b or 1, h, n, d / h) -> the same two.

    Cost: 2 b n d more activations per block, and attention with values three times as wide.

    Differs from the reference: s is one number per head, since only the row sums of its matrix have an effect;
        grids of 1 to 3 axes; no cache, and as many key heads as query heads. It cannot be used in `vispe.convert`,
        whose hosts cannot pass tables from block to block.

    Raises:
        OptionError: an option is not accepted, or dim / num_heads is odd.
        ShapeError: the state does not match the tokens.

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
        dim: PositiveInt,
        num_heads: PositiveInt,
        hidden: PositiveInt | None = None,
        position_size: PositiveInt | None = None,
        act: Activation = "silu",
        eps: PositiveFloat = 1e-6,
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
        # zeros: initially, attention does not change the tables
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
        # cosines and sines, per sample, head and token
        expected = 2, len(x), heads, x.shape[1], width
        if (
            state.ndim != 5
            or state.shape[1] not in (1, len(x))
            or (2, *state.shape[2:]) != (2, *expected[2:])
        ):
            raise ShapeError(
                f"TapeBlock needs a state {expected} for x {tuple(x.shape)}, got {tuple(state.shape)}."
            )
        state = at_least_float32(state).expand(expected)
        # (b, n, 3 d) -> (3, b, h, n, d / h)
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, heads, width)).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        # the tables are concatenated to the values: one pass averages content and positions with the same weights
        values = torch.cat([v, *state.to(v.dtype).unbind(0)], -1)
        out = attention(
            _rotated(q, state),
            _rotated(k, state),
            values,
            attn_mask=attn_mask,
            key_padding_mask=key_padding_mask,
            is_causal=self.causal,
            backend=self.backend,
        )
        # of shape (b, h, n, 3 d_h): averaged values, cosines and sines
        content, *averaged = out.split(width, -1)
        x = x + self.proj(content.transpose(1, 2).flatten(2))
        # (h, 1, 1) * (2, b, h, n, d / h) -> (2, b, h, n, d / h)
        state = state + at_least_float32(self.state_gain)[:, None, None] * torch.stack(averaged)
        h = self.norm2(x)
        h = self.mlp_down(self.act(self.mlp_gate(h)) * self.mlp_up(h))
        return x + h, state + self._change(h, state)

    def _change(self, h: Tensor, state: Tensor) -> Tensor:
        """Return the update of the tables from the MLP output (b, n, d), mixed across heads."""
        # (b, n, size) -> (b, size, n, 1)
        gate = self.act(at_least_float32(self.state_gate(h))).transpose(1, 2)[..., None]
        # heads last, for the two maps along them
        up = self.state_up(state.movedim(2, -1)).movedim(-1, 2)
        return self.state_down((gate * up).movedim(2, -1)).movedim(-1, 2)


def _rotated(x: Tensor, state: Tensor) -> Tensor:
    """Return x (b, h, n, d_h) rotated by tables whose two halves may differ, in the dtype of x."""
    cos, sin = state.unbind(0)
    # channels c and c + d_h / 2 are a pair
    first, second = x.chunk(2, -1)
    return (x * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)
