"""timm's windowed attention: SAM, Swin and Swin V2, MaxViT and CoAtNet."""

from __future__ import annotations

import torch
import torch.fx
from torch import Tensor, nn

from vispe.hosts.common import fx_leaves
from vispe.hosts.windows.attention import SiteAttention, cosine, split


@torch.fx.wrap
def decomposed_of_timm(q: Tensor, rows: Tensor, columns: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return the decomposed relative bias of timm's SAM (b, h, n, n) for queries (b, h, n, d_h)."""
    from timm.models.vision_transformer_sam import get_decomposed_rel_pos_bias

    bias = get_decomposed_rel_pos_bias(q.flatten(0, 1), rows, columns, shape, shape)
    return bias.unflatten(0, q.shape[:2])


class SamAttention(SiteAttention):
    """Attention of timm's SAM on a feature map (b, h, w, d), windowed or global."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the feature map (b, h, w, d) after attention."""
        x = fx_leaves.one_size(x)
        shape = (x.shape[1], x.shape[2])
        tokens = x.flatten(1, 2)
        q, k, v = split(self.qkv(tokens), self.num_heads)
        q, k = self.q_norm(q), self.k_norm(k)
        bias = None
        if self.vispe_grid.keep and self.use_rel_pos:
            bias = decomposed_of_timm(q, self.rel_pos_h, self.rel_pos_w, shape)
        out = self.vispe_attend(tokens, (q, k, v), shape, bias, self.attn_drop.p if self.training else 0.0)
        return self.proj_drop(self.proj(out)).reshape(x.shape)


class DetachedBias(nn.Module):
    """Placeholder of a detached relative bias of MaxViT, which stores the current window size.

    Args:
        window_size: rows and columns.
    """

    def __init__(self, window_size: tuple[int, int]) -> None:
        super().__init__()
        self.window_size = tuple(window_size)

    def set_window_size(self, window_size: tuple[int, int]) -> None:
        """Change the window size, as in timm."""
        self.window_size = tuple(window_size)


class PartitionAttention(SiteAttention):
    """Attention of timm's MaxViT in windows or grids of a feature map (b, h, w, d).

    The tokens of a dilated grid get adjacent positions.
    """

    def forward(self, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        """Return the feature map (b, h, w, d) after attention."""
        x = fx_leaves.one_size(x)
        qkv, heads = self.qkv(x).flatten(1, 2), self.num_heads
        if self.head_first:
            q, k, v = qkv.unflatten(-1, (heads, -1)).transpose(1, 2).chunk(3, dim=3)
        else:
            q, k, v = split(qkv, heads)
        out = self.vispe_mixed(x.flatten(1, 2), (q, k, v), (x.shape[1], x.shape[2]), shared_rel_pos)
        return self.proj_drop(self.proj(out.unflatten(1, (x.shape[1], x.shape[2]))))

    def vispe_mixed(
        self,
        tokens: Tensor,
        qkv: tuple[Tensor, Tensor, Tensor],
        shape: tuple[int, int],
        shared: Tensor | None,
    ) -> Tensor:
        """Return the tokens (b, n, d) after attention, with timm's own bias if it is in use."""
        bias = self.rel_pos.get_bias() if self.vispe_grid.keep and self.rel_pos is not None else shared
        return self.vispe_attend(tokens, qkv, shape, bias, self.attn_drop.p if self.training else 0.0)


class MapAttention(PartitionAttention):
    """Attention as in `PartitionAttention`, for channels-first feature maps (b, d, h, w), in MaxViT and CoAtNet."""

    def forward(self, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        """Return the feature map (b, d, h, w) after attention."""
        x = fx_leaves.one_size(x)
        shape, qkv = (x.shape[2], x.shape[3]), self.qkv(x).flatten(2)
        if self.head_first:
            q, k, v = qkv.unflatten(1, (self.num_heads, -1)).chunk(3, dim=2)
        else:
            q, k, v = qkv.unflatten(1, (3, self.num_heads, -1)).unbind(1)
        q, k, v = q.transpose(2, 3), k.transpose(2, 3), v.transpose(2, 3)
        out = self.vispe_mixed(x.flatten(2).transpose(1, 2), (q, k, v), shape, shared_rel_pos)
        return self.proj_drop(self.proj(out.transpose(1, 2).unflatten(2, shape)))


class SwinAttention(SiteAttention):
    """Windowed attention of timm's Swin."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return windows of tokens (b, n, d) after attention, with the mask (windows, n, n) of shifted windows."""
        bias = self.vispe_host_bias() if self.vispe_grid.keep else None
        shape, dropout = tuple(self.window_size), self.attn_drop.p if self.training else 0.0
        out = self.vispe_attend(x, self.vispe_projected(x), shape, bias, dropout, mask)
        return self.proj_drop(self.proj(out))

    def vispe_projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values (b, h, n, d_h)."""
        return split(self.qkv(x), self.num_heads)

    def vispe_host_bias(self) -> Tensor:
        """Return timm's own bias (1, h, n, n)."""
        return self._get_rel_pos_bias()

    def set_window_size(self, window_size: tuple[int, int]) -> None:
        """Change the window size, as in timm, also if the table is detached."""
        if getattr(self, "relative_position_bias_table", True) is not None:
            super().set_window_size(window_size)
            return
        size = (window_size, window_size) if isinstance(window_size, int) else tuple(window_size)
        index = torch.empty(size[0] * size[1], size[0] * size[1], dtype=torch.long)
        self.relative_position_index = index.to(self.relative_position_index.device)
        self.window_size, self.window_area = size, size[0] * size[1]
        self._init_buffers()


class SwinV2Attention(SwinAttention):
    """Attention of timm's Swin V2: cosine similarity of queries and keys, times a learned scale."""

    fused_attn = False  # the weights pass through a dropout module, where hooks can read them

    def vispe_projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values (b, h, n, d_h); the learned scale is applied to the queries."""
        qkv = self.qkv(x)
        if self.q_bias is not None:
            qkv = qkv + torch.cat((self.q_bias, self.k_bias, self.v_bias))
        q, k, v = split(qkv, self.num_heads)
        return *cosine(q, k, self.logit_scale), v

    def vispe_host_bias(self) -> Tensor:
        """Return timm's own bias (1, h, n, n), an MLP of log-spaced offsets."""
        area = self.window_size[0] * self.window_size[1]
        table = self.cpb_mlp(self.relative_coords_table).view(-1, self.num_heads)
        bias = table[self.relative_position_index.view(-1)].view(area, area, -1).permute(2, 0, 1)
        return 16 * bias.sigmoid()[None]
