"""MONAI's attention: global in ViT (and UNETR), windowed in Swin (and SwinUNETR), on images or volumes."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from vispe.errors import ShapeError, UnsupportedCombination, counted
from vispe.hosts.windows.attention import SiteAttention, split


class VolumeAttention(SiteAttention):
    """Attention of MONAI's ViT on the fixed grid of an image or a volume."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        """Return the tokens (b, n, d) after attention.

        Raises:
            UnsupportedCombination: the attention is masked, causal, or has its own relative embedding.
        """
        if attn_mask is not None or self.causal or self.rel_positional_embedding is not None:
            raise UnsupportedCombination(
                "MONAI's attention: masks, causal attention and relative embeddings of its own are not supported with "
                "an encoding. Build it without them."
            )
        if self.use_combined_linear:
            q, k, v = split(self.qkv(x), self.num_heads)
        else:
            q, k, v = (
                part(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
                for part in (self.to_q, self.to_k, self.to_v)
            )
        dropout = self.drop_weights.p if self.training else 0.0
        if self.save_attn:  # stored without dropout, as in MONAI
            scores = self.vispe_context(x, self.vispe_grid.grid, None).scores(self, (q,), (k,), v, x)
            weights = scores.softmax()
            self.att_mat = weights.detach()
            (out,) = scores.weigh(F.dropout(weights, dropout))
            out = out.transpose(1, 2).flatten(2)
        else:
            out = self.vispe_attend(x, (q, k, v), self.vispe_grid.grid, None, dropout)
        return self.drop_output(self.out_proj(out))


class VolumeWindowAttention(SiteAttention):
    """Attention of MONAI's Swin in windows of two or three axes, which are at most as large as the feature map."""

    vispe_shape: tuple[int, ...] | None = None

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Return windows of tokens (b, n, d) after attention, with the mask (windows, n, n) of shifted windows.

        Raises:
            ShapeError: the number of tokens is not that of a window.
        """
        tokens, shape = x.shape[1], self.vispe_shape or tuple(self.window_size)
        if math.prod(shape) != tokens:
            raise ShapeError(
                f"MONAI's window attention: the windows must have the shape {tuple(shape)}, got "
                f"{counted(tokens, 'token')}. Call the model from one thread at a time."
            )
        bias = self.vispe_host_bias(tokens) if self.vispe_grid.keep else None
        dropout = self.attn_drop.p if self.training else 0.0
        out = self.vispe_attend(x, split(self.qkv(x), self.num_heads), shape, bias, dropout, mask)
        return self.proj_drop(self.proj(out))

    def vispe_host_bias(self, tokens: int) -> Tensor:
        """Return MONAI's own bias (1, h, n, n)."""
        index = self.relative_position_index[:tokens, :tokens]
        return self.relative_position_bias_table[index].permute(2, 0, 1)[None]


class VolumeBlock(nn.Module):
    """A block of MONAI's Swin that passes the shape of its windows to its attention layer."""

    def forward_part1(self, x: Tensor, mask_matrix: Any) -> Tensor:
        """Return the feature map (b, ..., d) after attention in windows, which are clipped to the feature map."""
        sides = zip(x.shape[1:-1], self.window_size, strict=True)
        self.attn.vispe_shape = tuple(min(n, w) for n, w in sides)
        return super().forward_part1(x, mask_matrix)
