"""timm's attention layers and inlined-attention blocks, made to take a `Context`.

Each class differs from its parent in one thing: when the mask argument is a `Context`, attention is computed
with the encodings in it. Anything else takes timm's own path.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from timm.layers import Attention, AttentionRope, DiffAttention, apply_rot_embed_cat
from timm.models.eva import EvaAttention
from timm.models.vision_transformer import DiffParallelScalingBlock, ParallelScalingBlock
from torch import Tensor, nn
from torch.nn import functional as F

from vispe.hosts.transplant.context import Context


class VispeAttention(Attention):
    """timm's multi-head self-attention with positional encodings."""

    def forward(
        self, x: Tensor, attn_mask: Tensor | Context | None = None, is_causal: bool = False
    ) -> Tensor:
        """Return the tokens (b, n, d) after attention."""
        if not isinstance(attn_mask, Context):
            return super().forward(x, attn_mask=attn_mask, is_causal=is_causal)
        plain = attn_mask.plain_mask(self, x)
        if plain is not None:
            return super().forward(x, attn_mask=plain)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        out = self.norm(_attended(self, attn_mask, self.q_norm(q), self.k_norm(k), v, x))
        gate = getattr(self, "gate", None)  # newer timm only
        if gate is not None:
            out = out * gate(x).sigmoid()
        return self.proj_drop(self.proj(out))


class VispeDiffAttention(DiffAttention):
    """timm's differential attention with positional encodings; both maps of a head share its encoding."""

    def forward(
        self, x: Tensor, attn_mask: Tensor | Context | None = None, is_causal: bool = False
    ) -> Tensor:
        """Return the tokens (b, n, d) after attention."""
        if not isinstance(attn_mask, Context):
            return super().forward(x, attn_mask=attn_mask, is_causal=is_causal)
        q, k, v = self.qkv(x).chunk(3, dim=2)
        out = _differential(self, attn_mask, q, k, v, x)
        return self.proj_drop(self.proj(self.norm(out)))


class VispeEvaAttention(EvaAttention):
    """The attention of timm's Eva with positional encodings, beside or instead of its own rotary embedding."""

    def forward(
        self,
        x: Tensor,
        rope: Tensor | None = None,
        attn_mask: Tensor | Context | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Return the tokens (b, n, d) after attention."""
        if not isinstance(attn_mask, Context):
            return super().forward(x, rope=rope, attn_mask=attn_mask, is_causal=is_causal)
        plain = attn_mask.plain_mask(self, x)
        if plain is not None:
            return super().forward(x, rope=rope, attn_mask=plain)
        return _rotated(self, attn_mask, x, rope)


class VispeAttentionRope(AttentionRope):
    """timm's attention for rotary embeddings with positional encodings, beside or instead of its own."""

    def forward(
        self,
        x: Tensor,
        rope: Tensor | None = None,
        attn_mask: Tensor | Context | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Return the tokens (b, n, d) after attention."""
        if not isinstance(attn_mask, Context):
            return super().forward(x, rope=rope, attn_mask=attn_mask, is_causal=is_causal)
        plain = attn_mask.plain_mask(self, x)
        if plain is not None:
            return super().forward(x, rope=rope, attn_mask=plain)
        return _rotated(self, attn_mask, x, rope)


class VispeParallelScalingBlock(ParallelScalingBlock):
    """timm's block with attention and MLP side by side, with positional encodings."""

    def forward(
        self, x: Tensor, attn_mask: Tensor | Context | None = None, is_causal: bool = False
    ) -> Tensor:
        """Return the tokens (b, n, d) after the block."""
        if not isinstance(attn_mask, Context):
            return super().forward(x, attn_mask=attn_mask, is_causal=is_causal)
        y = self.in_norm(x)
        mlp, q, k, v = self.in_proj(y).split(self.in_split, dim=-1)
        q, k, v = (_split(t, self.num_heads) for t in (q, k, v))
        return _side_by_side(self, x, _attended(self, attn_mask, self.q_norm(q), self.k_norm(k), v, y), mlp)


class VispeDiffParallelScalingBlock(DiffParallelScalingBlock):
    """timm's side-by-side block with differential attention, with positional encodings."""

    def forward(
        self, x: Tensor, attn_mask: Tensor | Context | None = None, is_causal: bool = False
    ) -> Tensor:
        """Return the tokens (b, n, d) after the block."""
        if not isinstance(attn_mask, Context):
            return super().forward(x, attn_mask=attn_mask, is_causal=is_causal)
        y = self.in_norm(x)
        mlp, q, k, v = self.in_proj(y).split(self.in_split, dim=-1)
        return _side_by_side(self, x, _differential(self, attn_mask, q, k, v, y), mlp)


def _split(x: Tensor, heads: int) -> Tensor:
    """Return tokens (b, n, h * d_h) as (b, h, n, d_h)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _joined(x: Tensor) -> Tensor:
    """Return heads (b, h, n, d_h) as tokens (b, n, h * d_h)."""
    return x.transpose(1, 2).flatten(2)


def _attended(module: nn.Module, context: Context, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
    """Return attention on heads (b, h, n, d_h) as tokens (b, n, h * d_h)."""
    dropout = module.attn_drop.p if module.training else 0.0
    return _joined(context.attend(module, q, k, v, x, dropout))


def _differential(module: nn.Module, context: Context, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
    """Return the difference of two attention maps per head on the values, normed and joined (b, n, d)."""
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
    return _joined(out * (1 - module.lambda_init))


def _rotated(module: nn.Module, context: Context, x: Tensor, rope: Tensor | None) -> Tensor:
    """Return attention of the two classes of Eva on x (b, n, d); `rope` turns queries and keys first."""
    if module.qkv is not None:
        bias = getattr(module, "q_bias", None)
        if bias is None:
            qkv = module.qkv(x)
        else:
            qkv = F.linear(x, module.qkv.weight, torch.cat([bias, module.k_bias, module.v_bias]))
        q, k, v = qkv.chunk(3, dim=-1)
    else:
        q, k, v = module.q_proj(x), module.k_proj(x), module.v_proj(x)
    q, k, v = (t.unflatten(-1, (-1, module.head_dim)).transpose(1, 2) for t in (q, k, v))
    q, k = module.q_norm(q), module.k_norm(k)
    if rope is not None:
        n, half = module.num_prefix_tokens, module.rotate_half
        q, k = (
            torch.cat([t[:, :, :n], apply_rot_embed_cat(t[:, :, n:], rope, half=half)], 2).type_as(v)
            for t in (q, k)
        )
    groups = getattr(module, "num_kv_groups", 1)
    if groups > 1:  # each key head serves a run of query heads
        k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
    out = module.norm(_attended(module, context, q, k, v, x))
    gate = getattr(module, "gate", None)
    if gate is not None:
        out = out * gate(x).sigmoid()
    return module.proj_drop(module.proj(out))


def _side_by_side(block: nn.Module, x: Tensor, attn: Tensor, mlp: Tensor) -> Tensor:
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


def stock_type(module: nn.Module) -> type[nn.Module]:
    """Return timm's class of an attention layer or block, whether it is swapped or not."""
    return STOCK.get(type(module), type(module))


def attentions(model: nn.Module) -> Iterator[tuple[int, str, nn.Module]]:
    """Yield (block, path, module) of every attention layer, or of the block where attention is inlined.

    The module need not be one that can be swapped.
    """
    for i, block in enumerate(model.blocks):
        path = f"blocks.{i}"
        if stock_type(block) in SWAPS:
            yield i, path, block
        elif hasattr(block, "attns"):
            yield from ((i, f"{path}.attns.{j}.attn", branch.attn) for j, branch in enumerate(block.attns))
        elif hasattr(block, "attn"):
            yield i, f"{path}.attn", block.attn
        else:
            yield i, path, block
