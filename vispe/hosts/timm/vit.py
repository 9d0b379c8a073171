"""timm's `VisionTransformer` and `VisionTransformerDistilled` as they run with a positional encoding of vispe.

Conversion itself is in `vispe.hosts.timm.convert`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from timm.layers import patch_dropout_forward
from timm.models import VisionTransformer
from timm.models.deit import VisionTransformerDistilled
from torch import Tensor, nn

from vispe.grid import Positions
from vispe.hosts.timm.hosted import HostedTokens, hosted_class
from vispe.hosts.transplant import traced

OVERRIDDEN = ("forward_features", "forward_intermediates", "_pos_embed", "_load_from_state_dict")


@cache
def hosted(stock: type[VisionTransformer]) -> type[VisionTransformer]:
    """Return the converted counterpart of a ViT class.

    Raises:
        UnsupportedHost: the class is a subclass of timm's that changes what vispe replaces.
    """
    distilled = issubclass(stock, VisionTransformerDistilled)
    family = VisionTransformerDistilled if distilled else VisionTransformer
    return hosted_class(HostedViT, stock, family, OVERRIDDEN)


class HostedViT(HostedTokens, VisionTransformer):
    """The parts of a timm ViT that change when it is converted."""

    vispe_make = staticmethod(hosted)

    def _vispe_second_token(self) -> Tensor | None:
        return self.dist_token if isinstance(self, VisionTransformerDistilled) else self.reg_token

    def _vispe_drop(self, x: Tensor, pos: Positions, rope: Any) -> tuple[Tensor, Positions, Any]:
        drop = self.patch_drop
        if isinstance(drop, nn.Identity):
            return x, pos, rope
        x, keep = patch_dropout_forward(x, drop.prob, drop.num_prefix_tokens, drop.ordered, drop.training)
        return x, pos if keep is None else traced.gather(pos, keep), rope


VispeVisionTransformer = hosted(VisionTransformer)
VispeVisionTransformerDistilled = hosted(VisionTransformerDistilled)
