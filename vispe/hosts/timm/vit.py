"""Converted timm `VisionTransformer` and `VisionTransformerDistilled` models.

Conversion itself is in `vispe.hosts.common.conversion.convert`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from timm.layers import patch_dropout_forward
from timm.models import VisionTransformer
from timm.models.deit import VisionTransformerDistilled
from torch import Tensor, nn

from vispe.grid import Positions
from vispe.hosts.common import fx_leaves
from vispe.hosts.common.context import Context
from vispe.hosts.timm.converted import converted_timm_class
from vispe.hosts.timm.converted_tokens import ConvertedTokens

OVERRIDDEN = ("forward_features", "forward_intermediates", "_pos_embed", "_load_from_state_dict")


@cache
def converted_class(stock: type[VisionTransformer]) -> type[VisionTransformer]:
    """Return the converted class of a ViT class.

    Raises:
        UnsupportedHost: the class is a subclass of timm's that overrides methods replaced by vispe.
    """
    distilled = issubclass(stock, VisionTransformerDistilled)
    family = VisionTransformerDistilled if distilled else VisionTransformer
    return converted_timm_class(ConvertedViT, stock, family, OVERRIDDEN)


class ConvertedViT(ConvertedTokens, VisionTransformer):
    """Mixin of converted timm ViT models."""

    vispe_make = staticmethod(converted_class)

    def _vispe_embed(
        self, image: Tensor, mask: Tensor | None, is_causal: bool
    ) -> tuple[Tensor, Context, tuple[int, int]]:
        x, context, shape = super()._vispe_embed(image, mask, is_causal)
        late = self.num_prefix_tokens and self._vispe_prefix_from()
        return x, context.with_patches(self.num_prefix_tokens) if late else context, shape

    def _vispe_block(self, block: nn.Module, x: Tensor, context: Context, layer: int) -> Tensor:
        if context.patches is None or layer >= self._vispe_prefix_from():
            return super()._vispe_block(block, x, context, layer)
        # prefix tokens that enter at a later block bypass this block
        p = self.num_prefix_tokens
        return torch.cat([x[:, :p], super()._vispe_block(block, x[:, p:], context.patches, layer)], 1)

    def _vispe_prefix_from(self) -> int:
        # max(..., default=0) breaks the graph in torch.compile of torch 2.11
        return max([0, *(e.prefix_from for e in self._vispe_all())])

    def _vispe_second_token(self) -> Tensor | None:
        return self.dist_token if isinstance(self, VisionTransformerDistilled) else self.reg_token

    def _vispe_drop(self, x: Tensor, pos: Positions, rope: Any) -> tuple[Tensor, Positions, Any]:
        drop = self.patch_drop
        if isinstance(drop, nn.Identity):
            return x, pos, rope
        x, keep = patch_dropout_forward(x, drop.prob, drop.num_prefix_tokens, drop.ordered, drop.training)
        return x, pos if keep is None else fx_leaves.gather(pos, keep), rope


VispeVisionTransformer = converted_class(VisionTransformer)
VispeVisionTransformerDistilled = converted_class(VisionTransformerDistilled)
