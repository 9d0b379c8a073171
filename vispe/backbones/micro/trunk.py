"""The transformer of vispe_micro, whose attention decreases with distance as in `alibi2d` with learned slopes."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor, nn

from vispe.attention import DistanceBias, attention
from vispe.backbones.micro.equivariant_conv import Gelu
from vispe.grid import Grid, Positions
from vispe.hosts.common.position_cache import PositionCache

REFERENCE = (32, 32)  # distances are divided by the diagonal of this grid, for images of any size


class Trunk(nn.Module):
    """Transformer over a feature map, (b, d, rows, columns) -> the same shape, normalised.

    Its encoding is `alibi2d(slopes=learned,normalize=reference,wrap=false)`: the bias for a distance in
    tokens is the same for every image size, for tiles and for complete images.

    Args:
        dim: width, d.
        depth: number of blocks.
        heads: number of heads of each block; their initial ranges are 0.5 to 32 tokens.
    """

    def __init__(self, dim: int, depth: int, heads: int) -> None:
        super().__init__()
        self.entry = nn.Conv2d(dim, dim, 1)
        self.blocks = nn.ModuleList(TrunkBlock(dim, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.positions = PositionCache()

    def forward(self, x: Tensor) -> Tensor:
        """Return the feature map (b, d, rows, columns) after all blocks and the final norm."""
        x = self.entry(x)
        grid = Grid((x.shape[-2], x.shape[-1]))
        pos = self.positions(grid, x)
        tokens = rearrange(x, "b d h w -> b (h w) d")
        for block in self.blocks:
            tokens = block(tokens, pos)
        return rearrange(self.norm(tokens), "b (h w) d -> b d h w", h=grid.shape[0])


class TrunkBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), on tokens (b, n, d)."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.slope = nn.Parameter(_diagonal() * 2.0 ** torch.linspace(1, -5, heads))
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.fc1, self.fc2, self.gelu = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim), Gelu()
        for layer in (self.qkv, self.proj, self.fc1, self.fc2):
            nn.init.trunc_normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor, pos: Positions) -> Tensor:
        """Return the tokens after the block."""
        q, k, v = rearrange(self.qkv(self.norm1(x)), "b n (t h d) -> t b h n d", t=3, h=self.heads)
        learning = torch.is_grad_enabled() and self.slope.requires_grad
        # masks of fixed slopes are cached with `pos`
        slopes = self.slope if learning else tuple(self.slope.tolist())
        bias = DistanceBias(slopes, pos, wrap=False, normalize="reference", reference=REFERENCE)
        x = x + self.proj(rearrange(attention(q, k, v, bias=bias), "b h n d -> b n (h d)"))
        return x + self.fc2(self.gelu(self.fc1(self.norm2(x))))


def _diagonal() -> float:
    return float(sum((n - 1) ** 2 for n in REFERENCE) ** 0.5)
