"""Attention layers of transformers' vision towers, with a `Context` as an additional argument.

The only difference of each class from its parent is that attention is computed with the encodings of the
context. Parameters keep their names. Without a context, the positions of `vispe.positions_for` are used, or
an error is raised.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from einops import rearrange
from torch import Tensor, nn

from vispe.encodings.base import Encoding
from vispe.errors import InputError
from vispe.hosts.common.block_loops import context_for
from vispe.hosts.common.context import Context
from vispe.hosts.transformers.vision.attention_function import attended
from vispe.hosts.transformers.vision.packed_tokens import PackedContext

CALLS = "the model"  # the call that supplies positions, for messages


class ConvertedAttention(nn.Module):
    """Base class of converted attention layers of vision towers.

    Attributes:
        vispe_layer: index of the block.
        pos_enc: encodings with parameters of this layer.
    """

    vispe_layer: int
    pos_enc: Encoding | None

    @property
    def fused_attn(self) -> bool:
        """Whether backend selection is enabled; False for the attention implementation 'eager'."""
        return self.config._attn_implementation != "eager"


class PackedAttention(ConvertedAttention):
    """Attention of the Qwen towers, within each chunk of a packed sequence."""

    def forward(
        self,
        hidden_states: Tensor,
        cu_seqlens: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        max_seqlen: int | None = None,
        vispe_context: PackedContext | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return the tokens (n, d) after attention; arguments as in transformers.

        Raises:
            InputError: there is no context.
        """
        if vispe_context is None:
            raise InputError(
                f"Attention of block {self.vispe_layer}: its encoding needs positions, got none. Call the tower; its "
                "blocks cannot be called directly, since images of several grids are packed."
            )
        qkv = self.qkv(hidden_states)
        q, k, v = rearrange(qkv, "n (three h d) -> three n h d", three=3, h=self.num_heads)
        if vispe_context.rope:
            q, k = sys.modules[type(self).__module__].apply_rotary_pos_emb_vision(q, k, *position_embeddings)
        chunks = vispe_context.chunks(self.vispe_layer)
        dropout_p = self.attention_dropout if self.training else 0.0
        return self.proj(chunks.attend(self, q, k, v, hidden_states, dropout_p))


class ClipAttention(ConvertedAttention):
    """Attention of the CLIP and SigLIP towers."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        vispe_context: Context | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the tokens (b, n, d) after attention, and its weights (b, h, n, n) if eager."""
        x, context = hidden_states, context_for(self, hidden_states, vispe_context, CALLS)
        qkv = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        out, weights = attended(self, context, x, *qkv, attention_mask, self.dropout)
        return self.out_proj(out), weights


class InternAttention(ConvertedAttention):
    """Attention of the InternVL tower, whose queries and keys may be normalised over all heads."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        vispe_context: Context | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the tokens (b, n, d) after attention, and its weights (b, h, n, n) if eager."""
        x, context = hidden_states, context_for(self, hidden_states, vispe_context, CALLS)
        qkv = self.q_norm(self.q_proj(x)), self.k_norm(self.k_proj(x)), self.v_proj(x)
        out, weights = attended(self, context, x, *qkv, attention_mask, self.attention_dropout)
        return self.projection_dropout(self.projection_layer(out)), weights


class GridAttention(ConvertedAttention):
    """Attention of ViT, DINOv2, DINOv3 and similar models: four projections, and optionally the model's own RoPE."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        vispe_context: Context | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the tokens (b, n, d) after attention, and its weights (b, h, n, n) if eager."""
        x, rotate = hidden_states, None
        context = context_for(self, x, vispe_context, CALLS)
        if context.rope and position_embeddings is not None:
            rotary = sys.modules[type(self).__module__].apply_rotary_pos_emb
            rotate = functools.partial(rotary, cos=position_embeddings[0], sin=position_embeddings[1])
        qkv = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        dropout_p = self.attention_dropout if hasattr(self, "attention_dropout") else self.dropout
        out, weights = attended(self, context, x, *qkv, attention_mask, dropout_p, rotate)
        return self.o_proj(out), weights


class VideoMaeAttention(ConvertedAttention):
    """Attention of VideoMAE, without output projection, which is a separate module."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        vispe_context: Context | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the tokens (b, n, d) after attention, and its weights (b, h, n, n) if eager."""
        x, context = hidden_states, context_for(self, hidden_states, vispe_context, CALLS)
        qkv = self.query(x), self.key(x), self.value(x)
        return attended(self, context, x, *qkv, attention_mask, self.dropout_prob)


class JepaAttention(ConvertedAttention):
    """Attention of V-JEPA 2, whose own RoPE has the axes frames, rows and columns."""

    def forward(
        self, hidden_states: Tensor, position_mask: Tensor | None = None, vispe_context: Context | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the tokens (b, n, d) after attention, and its weights (b, h, n, n) if eager."""
        x, rotate = hidden_states, None
        context = context_for(self, x, vispe_context, CALLS)
        if context.rope:
            ids = self.get_position_ids(x, position_mask)
            rotate = lambda q, k: tuple(self.apply_rotary_embeddings(t, ids) for t in (q, k))  # noqa: E731
        qkv = self.query(x), self.key(x), self.value(x)
        out, weights = attended(self, context, x, *qkv, None, self.dropout_prob, rotate)
        return self.proj(out), weights


class JepaLayer(nn.Module):
    """The block of V-JEPA 2, which passes the context to its attention."""

    def forward(
        self,
        hidden_states: Tensor,
        position_mask: Tensor | None = None,
        vispe_context: Context | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the tokens (b, n, d) after the block, and the weights of its attention if eager."""
        if vispe_context is None:
            return super().forward(hidden_states, position_mask, **kwargs)
        out, weights = self.attention(self.norm1(hidden_states), position_mask, vispe_context)
        x = self.drop_path(out) + hidden_states
        return self.drop_path(self.mlp(self.norm2(x))) + x, weights


class InternLayer(nn.Module):
    """The block of the InternVL tower, which passes the context to its attention."""

    def forward(self, hidden_states: Tensor, vispe_context: Context | None = None) -> Tensor:
        """Return the tokens (b, n, d) after the block."""
        if vispe_context is None:
            return super().forward(hidden_states)
        x = hidden_states
        x = x + self.lambda_1 * self.attention(self.layernorm_before(x), vispe_context=vispe_context)[0]
        y = self.dropout(self.mlp(self.layernorm_after(x)))
        return x + (y if self.lambda_2 is None else self.lambda_2 * y)


class InternEncoder(nn.Module):
    """The encoder of the InternVL tower, which passes the context to its blocks."""

    def forward(self, hidden_states: Tensor, vispe_context: Context | None = None) -> Any:
        """Return the tokens (b, n, d) after all blocks, as transformers does."""
        if vispe_context is None:
            return super().forward(hidden_states)
        for layer in self.layer:
            hidden_states = layer(hidden_states, vispe_context=vispe_context)
        return sys.modules[type(self).__module__].BaseModelOutput(last_hidden_state=hidden_states)
