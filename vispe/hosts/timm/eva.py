"""timm's `Eva` (EVA-02, DINOv3, PE, RoPE-ViT) as it runs with a positional encoding of vispe.

Its own rotary embedding is taken out with the absolute table, unless it is kept (`keep_rope`, the term ``rope``);
kept, it turns queries and keys before the encodings see them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from timm.layers import apply_keep_indices_nlc
from timm.models import Eva
from torch import Tensor

from vispe.grid import Positions
from vispe.hosts.common import fx_leaves
from vispe.hosts.common.context import Context
from vispe.hosts.timm.converted import HostedTokens, hosted_class

OVERRIDDEN = ("forward_features", "forward_intermediates", "_pos_embed", "_load_from_state_dict")


@cache
def hosted(stock: type[Eva]) -> type[Eva]:
    """Return the converted counterpart of an Eva class, or raise `UnsupportedHost` as `hosted_class` does."""
    return hosted_class(HostedEva, stock, Eva, OVERRIDDEN)


class HostedEva(HostedTokens, Eva):
    """The parts of a timm Eva that change when it is converted."""

    vispe_make = staticmethod(hosted)

    def _pos_embed(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return tokens (b, n, d) of patches and the rotary embedding that is kept, as timm does."""
        x, pos, shape = self._vispe_by_hand(x)
        x, _, rope = self._vispe_drop(x, pos, self._vispe_rope(shape))
        return x, rope

    def _vispe_rope(self, shape: tuple[int, int]) -> Tensor | None:
        if self.rope is None:
            return None
        if self.dynamic_img_size or not hasattr(self.rope, "feat_shape"):
            return self.rope.get_embed(shape=shape)
        return self.rope.get_embed()

    def _vispe_drop(self, x: Tensor, pos: Positions, rope: Any) -> tuple[Tensor, Positions, Any]:
        if self.patch_drop is None:
            return x, pos, rope
        x, keep = self.patch_drop(x)
        if keep is None:
            return x, pos, rope
        if rope is not None:  # a batch axis comes in front of the tokens; depth stays first
            rope = apply_keep_indices_nlc(x, rope, keep)
            rope = rope.transpose(0, 1) if self.rope_mixed else rope.unsqueeze(1)
        return x, fx_leaves.gather(pos, keep), rope

    def _vispe_arguments(self, context: Context, layer: int) -> tuple[Any, ...]:
        rope = context.rope
        if rope is not None and self.rope_mixed:
            rope = rope[layer]
        if self.vispe.inside:
            return (rope, context)
        return (rope, context.mask, context.is_causal)


VispeEva = hosted(Eva)
