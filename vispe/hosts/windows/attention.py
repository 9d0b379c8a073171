"""Attention layers that know their grid: the window, or the map of tokens that they are handed.

Each class stands in front of the layer of a library and replaces its forward pass; parameters keep their names. Such a
layer has encodings of its own, since heads and windows differ from stage to stage. The host's relative table, where it
is kept, and the mask of shifted windows are added to the logits.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn
from torch.nn import functional as F

from vispe.encodings.base import Encoding
from vispe.encodings.parts.preparing import prepare
from vispe.grid import Grid
from vispe.hosts.transplant import traced
from vispe.hosts.transplant.cache import PositionCache
from vispe.hosts.transplant.context import Context


@dataclass
class Site:
    """What a layer needs to know beside its own weights.

    Attributes:
        grid: the grid that it was built for.
        prefix: tokens without a place.
        keep: whether the host's own relative table counts.
        cache: positions of the last grids.
    """

    grid: tuple[int, int]
    prefix: int
    keep: bool
    cache: PositionCache = field(default_factory=PositionCache)


class Sited(nn.Module):
    """What every attention layer of a converted model has.

    Attributes:
        vispe_layer: number of the layer.
        vispe_site: its grid.
        pos_enc: its encodings.
    """

    fused_attn: bool = True
    vispe_layer: int
    vispe_site: Site
    pos_enc: Encoding | None

    def vispe_attend(
        self,
        x: Tensor,
        qkv: tuple[Tensor, Tensor, Tensor],
        shape: tuple[int, int],
        mask: Tensor | None,
        dropout_p: float,
    ) -> Tensor:
        """Return the tokens (b, n, d) after attention of queries, keys and values (b, h, n, d_h) on a grid."""
        out = self.vispe_context(x, shape, mask).attend(self, *qkv, x, dropout_p)
        return out.transpose(1, 2).flatten(2)

    def vispe_context(self, x: Tensor, shape: tuple[int, int], mask: Tensor | None) -> Context:
        """Return the context of this layer for tokens (b, n, d) on a grid."""
        site = self.vispe_site
        parts = () if self.pos_enc is None else self.pos_enc.parts()
        if isinstance(x, torch.fx.Proxy):  # a graph keeps no positions
            return Context(traced.sited(x, shape, site.prefix, site.grid, parts), (), mask, False)
        pos = site.cache(Grid(shape, prefix=site.prefix, reference=site.grid), x)
        return Context(prepare(parts, pos, batch=x.shape[0]), (), mask, False)


def _split(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values (b, h, n, d_h) of projected tokens (b, n, 3 h d_h)."""
    q, k, v = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


def _joined(*terms: Tensor | None) -> Tensor | None:
    """Return the sum of masks, or None where there is none."""
    there = [t for t in terms if t is not None]
    return sum(there[1:], there[0]) if there else None


@torch.fx.wrap
def decomposed_of_timm(q: Tensor, rows: Tensor, columns: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return what timm's SAM adds to the logits (b, h, n, n) of queries (b, h, n, d_h) from its own tables."""
    from timm.models.vision_transformer_sam import get_decomposed_rel_pos_bias as made

    return made(q.flatten(0, 1), rows, columns, shape, shape).unflatten(0, q.shape[:2])


class SamAttention(Sited):
    """Attention of timm's SAM on the map of tokens (b, h, w, d) that it is handed, a window or all."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the map after attention."""
        shape = (x.shape[1], x.shape[2])
        tokens = x.flatten(1, 2)
        q, k, v = _split(self.qkv(tokens), self.num_heads)
        q, k = self.q_norm(q), self.k_norm(k)
        bias = None
        if self.vispe_site.keep and self.use_rel_pos:
            bias = decomposed_of_timm(q, self.rel_pos_h, self.rel_pos_w, shape)
        out = self.vispe_attend(tokens, (q, k, v), shape, bias, self.attn_drop.p if self.training else 0.0)
        return self.proj_drop(self.proj(out)).unflatten(1, shape)


class HubSamAttention(Sited):
    """Attention of transformers' SAM; eager attention returns its weights (b h, n, n)."""

    @property
    def fused_attn(self) -> bool:
        """Whether any backend may compute attention."""
        return "Sdpa" in type(self).__name__

    def forward(
        self, hidden_states: Tensor, output_attentions: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the map (b, h, w, d) after attention, and its weights where it is eager."""
        del output_attentions
        shape = (hidden_states.shape[1], hidden_states.shape[2])
        tokens = hidden_states.flatten(1, 2)
        q, k, v = _split(self.qkv(tokens), self.num_attention_heads)
        bias = None
        if self.vispe_site.keep and self.use_rel_pos:
            bias = self.get_decomposed_rel_pos(q.flatten(0, 1), self.rel_pos_h, self.rel_pos_w, shape, shape)
            bias = bias.flatten(3, 4).flatten(1, 2).unflatten(0, q.shape[:2])
        if self.fused_attn:
            return self.proj(self.vispe_attend(tokens, (q, k, v), shape, bias, 0.0)).unflatten(1, shape), None
        scores = self.vispe_context(tokens, shape, bias).scores(self, (q,), (k,), v, tokens)
        weights = scores.softmax()
        (out,) = scores.weigh(F.dropout(weights, self.dropout, self.training))
        out = self.proj(out.transpose(1, 2).flatten(2)).unflatten(1, shape)
        return out, weights.flatten(0, 1).to(out.dtype)


class VitDetAttention(Sited):
    """Attention of transformers' ViTDet, on windows or the whole map."""

    def forward(self, hidden_state: Tensor, output_attentions: bool = False) -> tuple[Tensor, ...]:
        """Return the map (b, h, w, d) after attention, and the weights (b, h, n, n) where they are asked for."""
        shape = (hidden_state.shape[1], hidden_state.shape[2])
        tokens = hidden_state.flatten(1, 2)
        q, k, v = _split(self.qkv(tokens), self.num_heads)
        bias = None
        if self.vispe_site.keep and self.use_relative_position_embeddings:
            add = sys.modules[type(self).__module__].add_decomposed_relative_positions
            nothing = q.new_zeros(q.shape[0] * q.shape[1], q.shape[2], q.shape[2])
            bias = add(nothing, q.flatten(0, 1), self.rel_pos_h, self.rel_pos_w, shape, shape)
            bias = bias.unflatten(0, q.shape[:2])
        if not output_attentions:
            return (self.proj(self.vispe_attend(tokens, (q, k, v), shape, bias, 0.0)).unflatten(1, shape),)
        scores = self.vispe_context(tokens, shape, bias).scores(self, (q,), (k,), v, tokens)
        weights = scores.softmax()
        (out,) = scores.weigh(weights)
        return self.proj(out.transpose(1, 2).flatten(2)).unflatten(1, shape), weights.to(out.dtype)


class HubSwinAttention(Sited):
    """Attention of transformers' Swin inside windows, which are square."""

    @property
    def fused_attn(self) -> bool:
        """Whether any backend may compute attention, or only plain products, as 'eager' asks."""
        return self.config._attn_implementation != "eager"

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return windows of tokens (b, n, d) after attention, and its weights (b, h, n, n) where it is eager."""
        del kwargs
        x, heads = hidden_states, self.num_attention_heads
        q, k, v = (
            p(x).unflatten(-1, (heads, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        if attention_mask is not None:
            attention_mask = attention_mask.repeat(x.shape[0] // attention_mask.shape[0], 1, 1)[:, None]
        mask = _joined(self.relative_position_bias() if self.vispe_site.keep else None, attention_mask)
        side, dropout = math.isqrt(x.shape[1]), self.attention_dropout if self.training else 0.0
        if self.fused_attn:
            return self.o_proj(self.vispe_attend(x, (q, k, v), (side, side), mask, dropout)), None
        scores = self.vispe_context(x, (side, side), mask).scores(self, (q,), (k,), v, x)
        weights = F.dropout(scores.softmax(), dropout)
        (out,) = scores.weigh(weights)
        return self.o_proj(out.transpose(1, 2).flatten(2)), weights.to(out.dtype)


class PartitionAttention(Sited):
    """Attention of timm's MaxViT in windows, or grids, of a map (b, h, w, d); tokens of a grid are its neighbours."""

    def forward(self, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        """Return the map after attention."""
        qkv, heads = self.qkv(x).flatten(1, 2), self.num_heads
        if self.head_first:
            q, k, v = qkv.unflatten(-1, (heads, -1)).transpose(1, 2).chunk(3, dim=3)
        else:
            q, k, v = _split(qkv, heads)
        out = self.vispe_mixed(x.flatten(1, 2), (q, k, v), (x.shape[1], x.shape[2]), shared_rel_pos)
        return self.proj_drop(self.proj(out.unflatten(1, (x.shape[1], x.shape[2]))))

    def vispe_mixed(
        self,
        tokens: Tensor,
        qkv: tuple[Tensor, Tensor, Tensor],
        shape: tuple[int, int],
        shared: Tensor | None,
    ) -> Tensor:
        """Return the tokens (b, n, d) after attention, with the host's own bias where it counts."""
        own = self.rel_pos.get_bias() if self.vispe_site.keep and self.rel_pos is not None else shared
        return self.vispe_attend(tokens, qkv, shape, own, self.attn_drop.p if self.training else 0.0)


class MapAttention(PartitionAttention):
    """The same of maps (b, d, h, w), in MaxViT and CoAtNet."""

    def forward(self, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        """Return the map after attention."""
        shape, qkv = (x.shape[2], x.shape[3]), self.qkv(x).flatten(2)
        if self.head_first:
            q, k, v = qkv.unflatten(1, (self.num_heads, -1)).chunk(3, dim=2)
        else:
            q, k, v = qkv.unflatten(1, (3, self.num_heads, -1)).unbind(1)
        q, k, v = q.transpose(2, 3), k.transpose(2, 3), v.transpose(2, 3)
        out = self.vispe_mixed(x.flatten(2).transpose(1, 2), (q, k, v), shape, shared_rel_pos)
        return self.proj_drop(self.proj(out.transpose(1, 2).unflatten(2, shape)))


class SwinAttention(Sited):
    """Attention of timm's Swin inside windows."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return windows of tokens (b, n, d) after attention, under the mask (windows, n, n) of shifted windows."""
        bias = self.vispe_own() if self.vispe_site.keep else None
        if mask is not None:
            mask = mask.repeat(x.shape[0] // mask.shape[0], 1, 1)[:, None]
        mask, dropout = _joined(bias, mask), self.attn_drop.p if self.training else 0.0
        out = self.vispe_attend(x, self.vispe_projected(x), tuple(self.window_size), mask, dropout)
        return self.proj_drop(self.proj(out))

    def vispe_projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values (b, h, n, d_h)."""
        return _split(self.qkv(x), self.num_heads)

    def vispe_own(self) -> Tensor:
        """Return the bias of the host (1, h, n, n)."""
        return self._get_rel_pos_bias()

    def set_window_size(self, window_size: tuple[int, int]) -> None:
        """Change the window, see timm; there may be no table to resample."""
        if getattr(self, "relative_position_bias_table", True) is not None:
            super().set_window_size(window_size)
            return
        size = (window_size, window_size) if isinstance(window_size, int) else tuple(window_size)
        rows = torch.empty(size[0] * size[1], size[0] * size[1], dtype=torch.long)
        self.relative_position_index = rows.to(self.relative_position_index.device)
        self.window_size, self.window_area = size, size[0] * size[1]
        self._init_buffers()


class SwinV2Attention(SwinAttention):
    """Attention of timm's Swin V2: the angle between queries and keys, times a learned scale."""

    fused_attn = False  # weights pass through a dropout of their own, which hooks may watch

    def vispe_projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values (b, h, n, d_h); the product of the first two has the learned scale."""
        qkv = self.qkv(x) if self.q_bias is None or self.qkv_bias_separate else F.linear(x, self.qkv.weight)
        if self.q_bias is not None:
            qkv = qkv + torch.cat((self.q_bias, self.k_bias, self.v_bias))
        q, k, v = _split(qkv, self.num_heads)
        return *cosine(q, k, self.logit_scale), v

    def vispe_own(self) -> Tensor:
        """Return the bias of the host (1, h, n, n), continuous in log-spaced offsets."""
        area = self.window_size[0] * self.window_size[1]
        table = self.cpb_mlp(self.relative_coords_table).view(-1, self.num_heads)
        bias = table[self.relative_position_index.view(-1)].view(area, area, -1).permute(2, 0, 1)
        return 16 * bias.sigmoid()[None]


def cosine(q: Tensor, k: Tensor, logit_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries and keys whose product / sqrt(d_h) is their cosine times a learned scale (h, 1, 1)."""
    scale = logit_scale.clamp(max=math.log(100.0)).exp() * q.shape[-1] ** 0.5
    return F.normalize(q, dim=-1) * scale, F.normalize(k, dim=-1)


Pair = tuple[int, int]


def _laid(x: Tensor, window: Pair, shift: Pair) -> tuple[Pair, Pair]:
    """Return how many windows a map (b, h, w, d) has, and how far it is rolled: not where one window holds it all."""
    counts = (-(-x.shape[1] // window[0]), -(-x.shape[2] // window[1]))
    rolled = (shift[0] if counts[0] > 1 else 0, shift[1] if counts[1] > 1 else 0)
    return counts, rolled


@torch.fx.wrap
def cut(x: Tensor, window: Pair, shift: Pair) -> Tensor:
    """Return the windows (b windows, n, d) of a map (b, h, w, d), padded to whole windows and rolled."""
    (rows, columns), rolled = _laid(x, window, shift)
    padded = F.pad(x, (0, 0, 0, -x.shape[2] % window[1], 0, -x.shape[1] % window[0]))
    if sum(rolled):
        padded = torch.roll(padded, (-rolled[0], -rolled[1]), (1, 2))
    tokens = padded.unflatten(2, (columns, window[1])).unflatten(1, (rows, window[0])).transpose(2, 3)
    return tokens.flatten(3, 4).flatten(0, 2)


@torch.fx.wrap
def together(out: Tensor, x: Tensor, window: Pair, shift: Pair) -> Tensor:
    """Return the map like x (b, h, w, d) of windows (b windows, n, d); undoes `cut`."""
    counts, rolled = _laid(x, window, shift)
    out = out.unflatten(0, (x.shape[0], *counts)).unflatten(3, window).transpose(2, 3)
    out = out.flatten(3, 4).flatten(1, 2)
    if sum(rolled):
        out = torch.roll(out, rolled, (1, 2))
    return out[:, : x.shape[1], : x.shape[2]].contiguous()


@torch.fx.wrap
def apart(x: Tensor, window: Pair, shift: Pair, bias: Tensor | None) -> Tensor | None:
    """Return a bias with the mask (b windows, 1, n, n) between parts of a window that are no neighbours in the map."""
    counts, rolled = _laid(x, window, shift)
    if not sum(rolled):
        return bias
    regions: list[Tensor] = []
    for count, size, s in zip(counts, window, rolled, strict=True):
        at = torch.arange(count * size, device=x.device)
        regions.append((at >= count * size - size).long() + (at >= count * size - s).long() * bool(s))
    region = regions[0][:, None] * 3 + regions[1]
    region = region.unflatten(1, (counts[1], window[1])).unflatten(0, (counts[0], window[0])).transpose(1, 2)
    region = region.reshape(-1, window[0] * window[1])
    other = region[:, None] != region[:, :, None]
    mask = torch.zeros_like(other, dtype=x.dtype).masked_fill(other, -100.0)
    return _joined(bias, mask.repeat(x.shape[0], 1, 1)[:, None])


class ShiftedAttention(Sited):
    """Attention of torchvision's Swin, which cuts the map (b, h, w, d) into windows itself; both versions."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the map after attention."""
        how = (tuple(self.window_size), tuple(self.shift_size))
        tokens = cut(x, *how)
        mask = apart(x, *how, self.get_relative_position_bias() if self.vispe_site.keep else None)
        dropout = self.attention_dropout if self.training else 0.0
        out = self.vispe_attend(tokens, self.vispe_projected(tokens), how[0], mask, dropout)
        return together(F.dropout(self.proj(out), self.dropout, self.training), x, *how)

    def vispe_projected(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values (b, h, n, d_h); keys of version 2 have no bias."""
        scale, bias = getattr(self, "logit_scale", None), self.qkv.bias
        if scale is None:
            return _split(self.qkv(tokens), self.num_heads)
        if bias is not None:
            q_bias, k_bias, v_bias = bias.chunk(3)
            bias = torch.cat([q_bias, torch.zeros_like(k_bias), v_bias])
        q, k, v = _split(F.linear(tokens, self.qkv.weight, bias), self.num_heads)
        return *cosine(q, k, scale), v


class WholeAttention(Sited):
    """torch's attention in torchvision's ViT, on the one grid that the model was built for."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, need_weights: bool = True, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return the tokens (b, n, d) after attention, and its weights where they are asked for, as in torch."""
        del key, value, kwargs  # the block hands its tokens on three times
        qkv = _split(F.linear(query, self.in_proj_weight, self.in_proj_bias), self.num_heads)
        context = self.vispe_context(query, self.vispe_site.grid, None)
        scores = context.scores(self, qkv[:1], qkv[1:2], qkv[2], query) if need_weights else None
        if scores is None:
            out = context.attend(self, *qkv, query, self.dropout if self.training else 0.0)
            return self.out_proj(out.transpose(1, 2).flatten(2)), None
        weights = F.dropout(scores.softmax(), self.dropout, self.training)
        (out,) = scores.weigh(weights)
        return self.out_proj(out.transpose(1, 2).flatten(2)), weights.mean(1).to(out.dtype)
