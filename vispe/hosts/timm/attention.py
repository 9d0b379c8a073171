"""timm's attention layers, and blocks with inlined attention, with a `Context` as their mask argument.

Each class differs from its parent only in that its mask argument may be a `Context`, and attention is computed with the
encodings in it. Without a context, the positions of `vispe.positions_for` are used, or an error is raised.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from timm.layers import Attention, AttentionRope, DiffAttention, apply_rot_embed_cat
from timm.models.eva import EvaAttention
from timm.models.vision_transformer import DiffParallelScalingBlock, ParallelScalingBlock
from torch import Tensor, nn
from torch.nn import functional as F

from vispe.hosts.common.block_loops import context_for
from vispe.hosts.common.context import Context
from vispe.hosts.common.layer_access import converted_in, is_plain_linear, layer_in, plain_class

CALLS = (
    "the model, forward_features or forward_intermediates"  # the calls that supply positions, for messages
)


class _Contextual(nn.Module):
    """Attention whose mask may be a `Context`, computed by `vispe_attend`."""

    vispe_stock_takes_masks = False  # whether timm's own attention is used where a dense mask is sufficient

    def forward(
        self, x: Tensor, attn_mask: Tensor | Context | None = None, is_causal: bool = False
    ) -> Tensor:
        """Return the tokens (b, n, d) after attention, or after the block."""
        context = context_for(self, x, attn_mask, CALLS, is_causal)
        if context.idle(self):
            return super().forward(x, attn_mask=context.mask, is_causal=context.is_causal)
        if self.vispe_stock_takes_masks and (plain := context.plain_mask(self, x)) is not None:
            return super().forward(x, attn_mask=plain)
        return self.vispe_attend(x, context)

    def vispe_attend(self, x: Tensor, context: Context) -> Tensor:
        """Return the tokens (b, n, d) after attention with the encodings of `context`, or after the block."""
        raise NotImplementedError


class VispeAttention(_Contextual, Attention):
    """timm's multi-head self-attention with positional encodings."""

    vispe_stock_takes_masks = True

    def vispe_attend(self, x: Tensor, context: Context) -> Tensor:
        """Return the tokens (b, n, d) after attention with the encodings of `context`."""
        # (b, n, 3 h d_h) -> 3 x (b, h, n, d_h)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return _projected(self, self.norm(_attended(self, context, self.q_norm(q), self.k_norm(k), v, x)), x)


class VispeDiffAttention(_Contextual, DiffAttention):
    """timm's differential attention with positional encodings; both maps of a head share its encoding."""

    def vispe_attend(self, x: Tensor, context: Context) -> Tensor:
        """Return the tokens (b, n, d) after attention with the encodings of `context`."""
        q, k, v = self.qkv(x).chunk(3, dim=2)
        return self.proj_drop(self.proj(self.norm(_differential(self, context, q, k, v, x))))


class _Rotated(nn.Module):
    """Eva's attention with positional encodings, in addition to or instead of its own rotary embedding."""

    vispe_stock_takes_masks = True

    def forward(
        self,
        x: Tensor,
        rope: Tensor | None = None,
        attn_mask: Tensor | Context | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Return the tokens (b, n, d) after attention; `rope` rotates queries and keys before the encodings."""
        context = context_for(self, x, attn_mask, CALLS, is_causal)
        # EVA-02 stores the biases outside its projection, since that of the keys is a buffer of zeros
        bias = getattr(self, "q_bias", None)
        # timm then reads the weight of the projection, which ignores adapters
        called = bias is None or self.qkv is None or self.qkv_bias_separate or is_plain_linear(self.qkv)
        if called and context.idle(self):
            return super().forward(x, rope=rope, attn_mask=context.mask, is_causal=context.is_causal)
        plain = context.plain_mask(self, x) if called else None
        if plain is not None:
            return super().forward(x, rope=rope, attn_mask=plain)
        if self.qkv is None:
            q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        elif bias is None:
            q, k, v = self.qkv(x).chunk(3, dim=-1)
        else:
            bias = torch.cat([bias, self.k_bias, self.v_bias])
            in_one = is_plain_linear(self.qkv) and not self.qkv_bias_separate
            qkv = F.linear(x, self.qkv.weight, bias) if in_one else self.qkv(x) + bias
            q, k, v = qkv.chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for t in (q, k, v))
        q, k = self.q_norm(q), self.k_norm(k)
        # the model's own RoPE does not rotate prefix tokens
        if rope is not None:
            n, half = self.num_prefix_tokens, self.rotate_half
            q, k = (
                torch.cat([t[:, :, :n], apply_rot_embed_cat(t[:, :, n:], rope, half=half)], 2).type_as(v)
                for t in (q, k)
            )
        # grouped-query attention: each key head serves consecutive query heads
        groups = getattr(self, "num_kv_groups", 1)
        if groups > 1:
            k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
        return _projected(self, self.norm(_attended(self, context, q, k, v, x)), x)


class VispeEvaAttention(_Rotated, EvaAttention):
    """The attention of timm's Eva with positional encodings."""


class VispeAttentionRope(_Rotated, AttentionRope):
    """timm's attention for rotary embeddings with positional encodings."""


class VispeParallelScalingBlock(_Contextual, ParallelScalingBlock):
    """timm's block with parallel attention and MLP, with positional encodings."""

    def vispe_attend(self, x: Tensor, context: Context) -> Tensor:
        """Return the tokens (b, n, d) after the block with the encodings of `context`."""
        y = self.in_norm(x)
        mlp, q, k, v = self.in_proj(y).split(self.in_split, dim=-1)
        q, k, v = (_split(t, self.num_heads) for t in (q, k, v))
        return _parallel(self, x, _attended(self, context, self.q_norm(q), self.k_norm(k), v, y), mlp)


class VispeDiffParallelScalingBlock(_Contextual, DiffParallelScalingBlock):
    """timm's parallel block with differential attention, with positional encodings."""

    def vispe_attend(self, x: Tensor, context: Context) -> Tensor:
        """Return the tokens (b, n, d) after the block with the encodings of `context`."""
        y = self.in_norm(x)
        mlp, q, k, v = self.in_proj(y).split(self.in_split, dim=-1)
        return _parallel(self, x, _differential(self, context, q, k, v, y), mlp)


def _projected(module: nn.Module, x: Tensor, inputs: Tensor) -> Tensor:
    """Return attention output (b, n, d) after the output projection, gated by the layer's `inputs` in newer timm."""
    gate = getattr(module, "gate", None)
    if gate is not None:
        x = x * gate(inputs).sigmoid()
    return module.proj_drop(module.proj(x))


def _split(x: Tensor, heads: int) -> Tensor:
    """Return tokens (b, n, h * d_h) as (b, h, n, d_h)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _merged(x: Tensor) -> Tensor:
    """Return heads (b, h, n, d_h) as tokens (b, n, h * d_h)."""
    return x.transpose(1, 2).flatten(2)


def _attended(module: nn.Module, context: Context, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
    """Return attention on heads (b, h, n, d_h) as tokens (b, n, h * d_h)."""
    dropout = module.attn_drop.p if module.training else 0.0
    return _merged(context.attend(module, q, k, v, x, dropout))


def _differential(module: nn.Module, context: Context, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
    """Return the difference of the two attention outputs of each head, normalised and merged to (b, n, d)."""
    # (b, n, h 2 d_h) -> (2, b, h, n, d_h)
    q, k = (t.unflatten(-1, (module.num_heads, 2, -1)).permute(3, 0, 2, 1, 4) for t in (q, k))
    v = _split(v, module.num_heads)
    queries, keys = module.q_norm(q).unbind(0), module.k_norm(k).unbind(0)
    if module.fused_attn:
        dropout = module.attn_drop_p if module.training else 0.0
        first, second = (context.attend(module, queries[i], keys[i], v, x, dropout) for i in (0, 1))
    else:
        scores = context.scores(module, queries, keys, v, x)
        first, second = scores.weigh(module.attn_drop(scores.softmax()))
    out = module.sub_norm(first - module._compute_lambda().type_as(q) * second)
    return _merged(out * (1 - module.lambda_init))


def _parallel(block: nn.Module, x: Tensor, attn: Tensor, mlp: Tensor) -> Tensor:
    """Return the block's output from its attention (b, n, d) and the input of its MLP (b, n, hidden)."""
    if block.mlp_bias is not None:
        mlp = mlp + block.mlp_bias
    mlp = block.mlp_drop(block.mlp_act(mlp))
    if block.out_proj is not None:
        y = block.out_proj(torch.cat([attn, mlp], -1))
    else:
        y = block.attn_out_proj(attn) + block.mlp_out_proj(mlp)
    return x + block.drop_path(block.ls(y))


SWAPS: dict[type[nn.Module], type[nn.Module]] = {
    Attention: VispeAttention,
    DiffAttention: VispeDiffAttention,
    EvaAttention: VispeEvaAttention,
    AttentionRope: VispeAttentionRope,
    ParallelScalingBlock: VispeParallelScalingBlock,
    DiffParallelScalingBlock: VispeDiffParallelScalingBlock,
}
STOCK = {ours: stock for stock, ours in SWAPS.items()}
LAYERS = (_Contextual, _Rotated)


def stock_type(module: nn.Module) -> type[nn.Module]:
    """Return timm's class of an attention layer or block, converted or not."""
    cls = plain_class(type(module))
    return STOCK.get(cls, cls)


def attentions(model: nn.Module) -> Iterator[tuple[int, str, nn.Module]]:
    """Yield (block, path, module) of every attention layer, or of the block where attention is inlined.

    Modules of unsupported classes are included.
    """
    for i, block in enumerate(model.blocks):
        path, block = layer_in(f"blocks.{i}", block)
        if stock_type(block) in SWAPS:
            yield i, path, block
        elif hasattr(block, "attns"):
            for j, branch in enumerate(block.attns):
                yield i, *converted_in(f"{path}.attns.{j}.attn", branch.attn)
        elif hasattr(block, "attn"):
            yield i, *converted_in(f"{path}.attn", block.attn)
        else:
            yield i, *converted_in(path, block)
