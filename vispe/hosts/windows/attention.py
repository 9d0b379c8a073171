"""Attention layers with their own grid: a window, or the feature map that they receive.

Each class is a mixin for an attention layer of a library and replaces its forward pass; parameters keep their names.
Each layer has its own encodings, since heads and windows differ between stages. The library's own relative
bias, if it stays in use, and the mask of shifted windows are added to the logits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.fx
from torch import Tensor, nn
from torch.nn import functional as F

from vispe.attention.bias.windows import WindowMask
from vispe.encodings.base import Encoding
from vispe.encodings.parts.bias.nearer_key_count import HIDDEN_PAIRS
from vispe.encodings.parts.preparation import prepare
from vispe.grid import Grid, Positions
from vispe.hosts.common import fx_leaves
from vispe.hosts.common.context import Context
from vispe.hosts.common.position_cache import PositionCache


@dataclass
class LayerGrid:
    """Grid of an attention layer.

    Attributes:
        grid: the grid that the layer had when the model was first converted.
        prefix: number of tokens without a position.
        keep: whether the library's own relative table is in use.
        cache: positions of recent grids.
    """

    grid: tuple[int, ...]
    prefix: int
    keep: bool
    cache: PositionCache = field(default_factory=PositionCache)


class SiteAttention(nn.Module):
    """Base class of converted attention layers with their own grid.

    Attributes:
        vispe_layer: index of the layer.
        vispe_grid: its grid.
        pos_enc: its encodings.
    """

    fused_attn: bool = True
    vispe_layer: int
    vispe_grid: LayerGrid
    pos_enc: Encoding | None

    def vispe_attend(
        self,
        x: Tensor,
        qkv: tuple[Tensor, Tensor, Tensor],
        shape: tuple[int, ...],
        host_bias: Tensor | None,
        dropout_p: float,
        shift_mask: Tensor | None = None,
    ) -> Tensor:
        """Return the tokens (b, n, d) after attention of queries, keys and values (b, h, n, d_h) on a grid."""
        out = self.vispe_context(x, shape, host_bias, shift_mask).attend(self, *qkv, x, dropout_p)
        return out.transpose(1, 2).flatten(2)

    def vispe_context(
        self, x: Tensor, shape: tuple[int, ...], host_bias: Tensor | None, shift_mask: Tensor | None = None
    ) -> Context:
        """Return the context of this layer.

        Args:
            x: tokens (b, n, d).
            shape: their grid.
            host_bias: the library's own bias of the logits, (b or 1, h or 1, n, n).
            shift_mask: additive mask (windows, n, n) between parts of shifted windows that are not adjacent in the
                feature map.
        """
        site = self.vispe_grid
        parts = () if self.pos_enc is None else self.pos_enc.parts()
        if isinstance(x, torch.fx.Proxy):  # a traced graph has no cache
            mask = dense_mask(x, host_bias, shift_mask)
            pos = fx_leaves.layer_positions(x, shape, site.prefix, site.grid, parts)
            return Context(hide_other_parts(pos, parts, x, shift_mask), (), mask, False)
        pos = site.cache(Grid(shape, prefix=site.prefix, reference=site.grid), x)
        if shift_mask is None or host_bias is not None:
            mask = dense_mask(x, host_bias, shift_mask)
        else:
            mask = WindowMask(shift_mask, pos, x.shape[0])
        pos = prepare(parts, pos, batch=x.shape[0])
        return Context(hide_other_parts(pos, parts, x, shift_mask), (), mask, False)


def split(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values (b, h, n, d_h) of projected tokens (b, n, 3 h d_h)."""
    q, k, v = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


@torch.fx.wrap
def dense_mask(x: Tensor, host_bias: Tensor | None, shift_mask: Tensor | None) -> Tensor | None:
    """Return the additive mask of windows x (b, n, d): the library's bias plus its shift mask for every image."""
    if shift_mask is None:
        return host_bias
    # (windows, n, n) -> (images * windows, 1, n, n)
    mask = shift_mask.repeat(x.shape[0] // shift_mask.shape[0], 1, 1)[:, None]
    return mask if host_bias is None else host_bias + mask


@torch.fx.wrap
def hide_other_parts(
    pos: Positions, parts: Sequence[Encoding], x: Tensor, shift_mask: Tensor | None
) -> Positions:
    """Return the positions of windows x (b, n, d), with the pairs hidden by a shift mask if an encoding counts keys."""
    if shift_mask is None or not any(e.counts_keys for e in parts):
        return pos
    hidden = (shift_mask != 0).repeat(x.shape[0] // shift_mask.shape[0], 1, 1)
    return pos.replace(attrs={**pos.attrs, HIDDEN_PAIRS: hidden})


def cosine(q: Tensor, k: Tensor, logit_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries and keys whose scaled dot product (q k / sqrt(d_h)) is their cosine times a learned scale."""
    # the scale (h, 1, 1) is stored as a logarithm and limited to 100, as in Swin V2
    scale = logit_scale.clamp(max=math.log(100.0)).exp() * q.shape[-1] ** 0.5
    return F.normalize(q, dim=-1) * scale, F.normalize(k, dim=-1)
