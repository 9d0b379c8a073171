"""open_clip's attention layers and default block, with a `Context` as their mask argument.

Each class differs from its parent only in that its mask argument may be a `Context`, and attention is computed with the
encodings in it. Parameters keep their names. Without a context, the positions of `vispe.positions_for` are used, or
an error is raised.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.fx
from open_clip.transformer import Attention, CustomResidualAttentionBlock, ResidualAttentionBlock
from torch import Tensor, nn
from torch.nn import functional as F

from vispe.hosts.common.block_loops import context_for, mask_of_torch
from vispe.hosts.common.context import Context
from vispe.hosts.common.layer_access import check_self_attention, converted_in, layer_in, plain_class

CALLS = "the tower, encode_image or forward_intermediates"  # the calls that supply positions, for messages


class VispeMultiheadAttention(nn.MultiheadAttention):
    """torch's multi-head attention in open_clip's default block, with positional encodings."""

    fused_attn = True

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | Context | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the tokens (b, n, d) after attention, and its weights if `need_weights`, as in torch.

        Raises:
            InputError: there are no positions, or the call is not self-attention.
        """
        if not isinstance(attn_mask, Context):
            check_self_attention(self.vispe_layer, (query, key, value), key_padding_mask)
            attn_mask = mask_of_torch(attn_mask, self.num_heads)
        context = context_for(self, query, attn_mask, CALLS, is_causal and attn_mask is None)
        # torch.fx cannot trace torch's own forward pass, in which boolean masks are also inverted
        masked = context.mask is not None or context.is_causal
        if context.idle(self) and not masked and not isinstance(query, torch.fx.Proxy):
            return super().forward(query, key, value, None, need_weights, None, average_attn_weights)
        q, k, v = _projected(self, query)
        weights = None
        if need_weights:
            scores = context.scores(self, (q,), (k,), v, query)
            weights = F.dropout(scores.softmax(), self.dropout, self.training)
            (out,) = scores.weigh(weights)
            weights = (weights.mean(1) if average_attn_weights else weights).to(out.dtype)
        else:
            out = context.attend(self, q, k, v, query, self.dropout if self.training else 0.0)
        return self.out_proj(out.transpose(1, 2).flatten(2)), weights


class VispeClipAttention(Attention):
    """The attention of open_clip's custom block with positional encodings."""

    fused_attn = True

    def forward(self, x: Tensor, attn_mask: Tensor | Context | None = None) -> Tensor:
        """Return the tokens (b, n, d) after attention."""
        context = context_for(self, x, attn_mask, CALLS)
        if context.idle(self):
            return super().forward(x, attn_mask=context.mask)
        q, k, v = _projected(self, x)
        dropout = self.attn_drop.p if self.training else 0.0
        out = context.attend(self, self.ln_q(q), self.ln_k(k), v, x, dropout)
        if self.head_scale is not None:
            out = out * self.head_scale
        return self.out_drop(self.out_proj(self.ln_inner(out.transpose(1, 2).flatten(2))))


class VispeResidualAttentionBlock(ResidualAttentionBlock):
    """open_clip's default block, which would cast its mask; a `Context` is passed on unchanged."""

    def attention(
        self,
        q_x: Tensor,
        k_x: Tensor | None = None,
        v_x: Tensor | None = None,
        attn_mask: Tensor | Context | None = None,
    ) -> Tensor:
        """Return the tokens (b, n, d) after attention."""
        if not isinstance(attn_mask, Context):
            return super().attention(q_x, k_x, v_x, attn_mask)
        return self.attn(q_x, q_x, q_x, need_weights=False, attn_mask=attn_mask)[0]


def _projected(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values (b, h, n, d_h) of tokens (b, n, d)."""
    qkv = F.linear(x, module.in_proj_weight, module.in_proj_bias)
    q, k, v = qkv.unflatten(-1, (3, module.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


SWAPS: dict[type[nn.Module], type[nn.Module]] = {
    nn.MultiheadAttention: VispeMultiheadAttention,
    Attention: VispeClipAttention,
    ResidualAttentionBlock: VispeResidualAttentionBlock,
    CustomResidualAttentionBlock: CustomResidualAttentionBlock,
}
STOCK = {ours: stock for stock, ours in SWAPS.items()}
LAYERS = (VispeMultiheadAttention, VispeClipAttention)


def stock_type(module: nn.Module) -> type[nn.Module]:
    """Return open_clip's class of an attention layer or block, converted or not."""
    cls = plain_class(type(module))
    return STOCK.get(cls, cls)


def attentions(tower: nn.Module) -> Iterator[tuple[int, str, nn.Module]]:
    """Yield (block, path, module) of every attention layer of an image tower, or of the block if it has none."""
    for i, block in enumerate(tower.transformer.resblocks):
        path, block = layer_in(f"transformer.resblocks.{i}", block)
        inside = (f"{path}.attn", block.attn) if hasattr(block, "attn") else (path, block)
        yield i, *converted_in(*inside)
