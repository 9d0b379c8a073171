"""Converted timm `Eva` models (EVA-02, DINOv3, PE, RoPE-ViT).

The model's own rotary embedding is detached together with the absolute table, unless it stays in use
(`keep_rope`, the term ``rope``). In use, it rotates queries and keys before the encodings.
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
from vispe.hosts.timm.converted import converted_timm_class
from vispe.hosts.timm.converted_tokens import ConvertedTokens

OVERRIDDEN = ("forward_features", "forward_intermediates", "_pos_embed", "_load_from_state_dict")


@cache
def converted_class(stock: type[Eva]) -> type[Eva]:
    """Return the converted class of an Eva class; raise `UnsupportedHost` as `converted_timm_class` does."""
    return converted_timm_class(ConvertedEva, stock, Eva, OVERRIDDEN)


class ConvertedEva(ConvertedTokens, Eva):
    """Mixin of converted timm Eva models."""

    vispe_make = staticmethod(converted_class)

    def _pos_embed(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return tokens (b, n, d) of patches and the rotary embedding in use, as timm does."""
        x, pos, shape = self._vispe_assemble(x)
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
        if rope is not None:  # selected per sample, so a batch axis precedes the tokens; depth stays first
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


VispeEva = converted_class(Eva)
