"""Attention layers that know their grid: the window, or the map of tokens that they are handed.

Each class stands in front of the layer of a library and replaces its forward pass; parameters keep their names. Such a
layer has encodings of its own, since heads and windows differ from stage to stage. The host's relative table, where it
is kept, and the mask of shifted windows are added to the logits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.fx
from torch import Tensor, nn
from torch.nn import functional as F

from vispe.attention.bias.windows import WindowMask
from vispe.encodings.base import Encoding
from vispe.encodings.parts.preparation import prepare
from vispe.grid import Grid
from vispe.hosts.common import fx_leaves
from vispe.hosts.common.context import Context
from vispe.hosts.common.position_cache import PositionCache


@dataclass
class Site:
    """What a layer needs to know beside its own weights.

    Attributes:
        grid: the grid that it was built for.
        prefix: tokens without a place.
        keep: whether the host's own relative table counts.
        cache: positions of the last grids.
    """

    grid: tuple[int, ...]
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
        shape: tuple[int, ...],
        own: Tensor | None,
        dropout_p: float,
        shifted: Tensor | None = None,
    ) -> Tensor:
        """Return the tokens (b, n, d) after attention of queries, keys and values (b, h, n, d_h) on a grid."""
        out = self.vispe_context(x, shape, own, shifted).attend(self, *qkv, x, dropout_p)
        return out.transpose(1, 2).flatten(2)

    def vispe_context(
        self, x: Tensor, shape: tuple[int, ...], own: Tensor | None, shifted: Tensor | None = None
    ) -> Context:
        """Return the context of this layer.

        Args:
            x: tokens (b, n, d).
            shape: their grid.
            own: what the host itself adds to the logits, (b or 1, h or 1, n, n).
            shifted: its mask (windows, n, n) between parts of windows that are no neighbours in the map.
        """
        site = self.vispe_site
        parts = () if self.pos_enc is None else self.pos_enc.parts()
        if isinstance(x, torch.fx.Proxy):  # a graph keeps no positions
            mask = dense_mask(x, own, shifted)
            return Context(fx_leaves.sited(x, shape, site.prefix, site.grid, parts), (), mask, False)
        pos = site.cache(Grid(shape, prefix=site.prefix, reference=site.grid), x)
        if shifted is None or own is not None:
            mask = dense_mask(x, own, shifted)
        else:
            mask = WindowMask(shifted, pos, x.shape[0])
        return Context(prepare(parts, pos, batch=x.shape[0]), (), mask, False)


def split(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values (b, h, n, d_h) of projected tokens (b, n, 3 h d_h)."""
    q, k, v = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


@torch.fx.wrap
def dense_mask(x: Tensor, own: Tensor | None, shifted: Tensor | None) -> Tensor | None:
    """Return what is added to the logits of windows x (b, n, d): the host's bias, and its mask for every image."""
    if shifted is None:
        return own
    mask = shifted.repeat(x.shape[0] // shifted.shape[0], 1, 1)[:, None]
    return mask if own is None else own + mask


def cosine(q: Tensor, k: Tensor, logit_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries and keys whose product / sqrt(d_h) is their cosine times a learned scale (h, 1, 1)."""
    scale = logit_scale.clamp(max=math.log(100.0)).exp() * q.shape[-1] ** 0.5
    return F.normalize(q, dim=-1) * scale, F.normalize(k, dim=-1)
