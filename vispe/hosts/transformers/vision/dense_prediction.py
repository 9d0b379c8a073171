"""Attention of Sapiens 2 with groups of heads, and encoders whose stock forward pass passes no keywords to blocks."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from vispe.hosts.common.block_loops import context_for
from vispe.hosts.common.context import Context
from vispe.hosts.transformers.vision.attention import CALLS, ConvertedAttention
from vispe.hosts.transformers.vision.attention_function import attended


class SapiensAttention(ConvertedAttention):
    """Attention of Sapiens 2: heads share keys and values in groups; queries and keys of each head are normalised."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        vispe_context: Context | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the tokens (b, n, d) after attention, and its weights (b, h, n, n) if eager."""
        x, context = hidden_states, context_for(self, hidden_states, vispe_context, CALLS)
        k, v = (self._per_head(projection(x)) for projection in (self.k_proj, self.v_proj))

        def prepared(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
            q, k = self.q_norm(q), self.k_norm(k)
            if not context.rope or position_embeddings is None:
                return q, k
            return sys.modules[type(self).__module__].apply_rotary_pos_emb(q, k, *position_embeddings)

        out, weights = attended(
            self, context, x, self.q_proj(x), k, v, attention_mask, self.dropout, prepared
        )
        return self.o_proj(out), weights

    def _per_head(self, x: Tensor) -> Tensor:
        """Return keys or values (b, n, h_kv d_h) repeated for all heads (b, n, h d_h)."""
        groups = self.num_key_value_groups
        return x.unflatten(-1, (-1, self.head_dim)).repeat_interleave(groups, dim=2).flatten(2)


class DptEncoder(nn.Module):
    """The encoder of DPT, which passes the context to its blocks."""

    def forward(self, hidden_states: Tensor, vispe_context: Context | None = None, **kwargs: Any) -> Any:
        """Return the tokens (b, n, d) after all blocks, as transformers does."""
        if vispe_context is None:
            return super().forward(hidden_states, **kwargs)
        for layer in self.layer:
            hidden_states = layer(hidden_states, vispe_context=vispe_context)
        return sys.modules[type(self).__module__].BaseModelOutput(last_hidden_state=hidden_states)


class NestedEncoder(nn.Module):
    """The encoder of DINOv2, TIPSv2 and RADIO in transformers 5.17, which passes the context to its blocks."""

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        vispe_context: Context | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return the tokens (b, n, d) after all blocks, as transformers does."""
        del kwargs  # read by the decorators, as in transformers
        for layer in self.layer:
            hidden_states = layer(hidden_states, attention_mask=attention_mask, vispe_context=vispe_context)
        return sys.modules[type(self).__module__].BaseModelOutput(last_hidden_state=hidden_states)


class NestedLayer(nn.Module):
    """The block of DINOv2, TIPSv2 and RADIO in transformers 5.17, which passes the context to its attention."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """Return the tokens (b, n, d) after the block."""
        x = self.layer_scale1(self.attention(self.norm1(hidden_states), **kwargs))
        x = self.drop_path(x) + hidden_states
        return self.drop_path(self.layer_scale2(self.mlp(self.norm2(x)))) + x
