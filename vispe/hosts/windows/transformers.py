"""transformers' windowed attention: SAM and its derivatives, SAM 3, ViTDet and Swin."""

from __future__ import annotations

import math
import sys
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from vispe.hosts.common import fx_leaves
from vispe.hosts.windows.attention import SiteAttention, split


class HubSamAttention(SiteAttention):
    """Attention of transformers' SAM; eager attention returns its weights (b h, n, n)."""

    @property
    def fused_attn(self) -> bool:
        """Whether backend selection is enabled; False for the eager class."""
        return "Sdpa" in type(self).__name__

    def forward(
        self, hidden_states: Tensor, output_attentions: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the feature map (b, h, w, d) after attention, and its weights (b h, n, n) if eager."""
        del output_attentions
        hidden_states = fx_leaves.one_size(hidden_states)
        shape = (hidden_states.shape[1], hidden_states.shape[2])
        tokens = hidden_states.flatten(1, 2)
        q, k, v = split(self.qkv(tokens), self.num_attention_heads)
        bias = None
        if self.vispe_grid.keep and self.use_rel_pos:
            bias = self.get_decomposed_rel_pos(q.flatten(0, 1), self.rel_pos_h, self.rel_pos_w, shape, shape)
            bias = bias.flatten(3, 4).flatten(1, 2).unflatten(0, q.shape[:2])
        if self.fused_attn:
            out = self.proj(self.vispe_attend(tokens, (q, k, v), shape, bias, 0.0))
            return out.reshape(hidden_states.shape), None
        scores = self.vispe_context(tokens, shape, bias).scores(self, (q,), (k,), v, tokens)
        # the returned weights are those of the output before dropout, so that gradients reach them
        returned = scores.softmax().to(q.dtype).flatten(0, 1)
        weights = F.dropout(returned.unflatten(0, q.shape[:2]), self.dropout, self.training)
        (out,) = scores.weigh(weights)
        return self.proj(out.transpose(1, 2).flatten(2)).reshape(hidden_states.shape), returned


class DetachedRotary(nn.Module):
    """Placeholder of the detached rotary embedding of a layer of SAM 3."""

    def forward(self, x: Tensor, position_ids: Tensor) -> None:
        """Return None."""


class HubSam3Attention(SiteAttention):
    """Attention of the ViT of transformers' SAM 3, windowed or global."""

    @property
    def fused_attn(self) -> bool:
        """Whether backend selection is enabled; False for the attention implementation 'eager'."""
        return self.config._attn_implementation != "eager"

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor] | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return the feature map (b, h, w, d) after attention, and its weights (b, h, n, n) if eager."""
        del kwargs
        hidden_states = fx_leaves.one_size(hidden_states)
        shape, tokens = (hidden_states.shape[1], hidden_states.shape[2]), hidden_states.flatten(1, 2)
        q, k, v = (
            p(tokens).unflatten(-1, (self.num_attention_heads, -1)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        if position_embeddings is not None:
            rotate = sys.modules[type(self).__module__].apply_rotary_pos_emb_2d
            q, k = rotate(q, k, *position_embeddings)
        dropout = self.attention_dropout if self.training else 0.0
        if self.fused_attn:
            out = self.o_proj(self.vispe_attend(tokens, (q, k, v), shape, None, dropout))
            return out.reshape(hidden_states.shape), None
        scores = self.vispe_context(tokens, shape, None).scores(self, (q,), (k,), v, tokens)
        weights = F.dropout(scores.softmax().to(q.dtype), dropout)
        (out,) = scores.weigh(weights)
        return self.o_proj(out.transpose(1, 2).flatten(2)).reshape(hidden_states.shape), weights


class VitDetAttention(SiteAttention):
    """Attention of transformers' ViTDet, windowed or global."""

    def forward(self, hidden_state: Tensor, output_attentions: bool = False) -> tuple[Tensor, ...]:
        """Return the feature map (b, h, w, d) after attention, and its weights (b, h, n, n) if `output_attentions`."""
        hidden_state = fx_leaves.one_size(hidden_state)
        shape = (hidden_state.shape[1], hidden_state.shape[2])
        tokens = hidden_state.flatten(1, 2)
        q, k, v = split(self.qkv(tokens), self.num_heads)
        bias = None
        if self.vispe_grid.keep and self.use_relative_position_embeddings:
            add = sys.modules[type(self).__module__].add_decomposed_relative_positions
            zeros = q.new_zeros(q.shape[0] * q.shape[1], q.shape[2], q.shape[2])
            bias = add(zeros, q.flatten(0, 1), self.rel_pos_h, self.rel_pos_w, shape, shape)
            bias = bias.unflatten(0, q.shape[:2])
        if not output_attentions:
            out = self.proj(self.vispe_attend(tokens, (q, k, v), shape, bias, 0.0))
            return (out.reshape(hidden_state.shape),)
        scores = self.vispe_context(tokens, shape, bias).scores(self, (q,), (k,), v, tokens)
        weights = scores.softmax().to(q.dtype)
        (out,) = scores.weigh(weights)
        return self.proj(out.transpose(1, 2).flatten(2)).reshape(hidden_state.shape), weights


class HubSwinAttention(SiteAttention):
    """Attention of transformers' Swin in square windows."""

    @property
    def fused_attn(self) -> bool:
        """Whether backend selection is enabled; False for the attention implementation 'eager'."""
        return self.config._attn_implementation != "eager"

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return windows of tokens (b, n, d) after attention, and its weights (b, h, n, n) if eager."""
        del kwargs
        x, heads = hidden_states, self.num_attention_heads
        q, k, v = (
            p(x).unflatten(-1, (heads, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        masks = (self.relative_position_bias() if self.vispe_grid.keep else None, attention_mask)
        side, dropout = math.isqrt(x.shape[1]), self.attention_dropout if self.training else 0.0
        if self.fused_attn:
            host_bias, shift_mask = masks
            out = self.vispe_attend(x, (q, k, v), (side, side), host_bias, dropout, shift_mask)
            return self.o_proj(out), None
        scores = self.vispe_context(x, (side, side), *masks).scores(self, (q,), (k,), v, x)
        weights = F.dropout(scores.softmax().to(q.dtype), dropout)
        (out,) = scores.weigh(weights)
        return self.o_proj(out.transpose(1, 2).flatten(2)), weights
