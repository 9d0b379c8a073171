"""Reference serving engine: pages of keys and values, prompts in chunks, and stored prefixes.

It uses positions like vLLM and SGLang: one request for each prompt, integer positions, a delta added to the number of
every generated token, cosines and sines from a table, and keys that are rotated before they are stored.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

BLOCK = 4  # tokens of a page


class MRotaryEmbedding(nn.Module):
    """Rotary layer of engines: a table, and sections with the axis of each pair."""

    def __init__(self, head_size: int, pairs: int, section: list[int]) -> None:
        super().__init__()
        self.head_size, self.rotary_dim, self.is_neox_style = head_size, 2 * pairs, True
        self.mrope_section, self.mrope_interleaved = section, False
        self.register_buffer("cos_sin_cache", torch.zeros(8, 2 * pairs))

    def axes(self) -> Tensor:
        time, height, width = self.mrope_section
        if not self.mrope_interleaved:
            return torch.tensor([0] * time + [1] * height + [2] * width)
        axis = torch.zeros(time + height + width, dtype=torch.long)
        axis[1 : 3 * height : 3], axis[2 : 3 * width : 3] = 1, 2
        return axis

    def forward(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        result = self.cos_sin_cache[positions]  # (3, tokens, 2 pairs)
        pairs = self.rotary_dim // 2
        cos, sin = (
            torch.stack([part[axis, :, pair] for pair, axis in enumerate(self.axes().tolist())], -1)
            for part in (result[..., :pairs], result[..., pairs:])
        )
        return self.rotate(query, cos, sin), self.rotate(key, cos, sin)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = x.view(len(x), -1, self.head_size)
        a, b = heads[..., : self.rotary_dim].chunk(2, -1)
        cos, sin = cos[:, None], sin[:, None]
        return torch.cat([a * cos - b * sin, b * cos + a * sin, heads[..., self.rotary_dim :]], -1).reshape(
            x.shape
        )


class Engine(nn.Module):
    """Serves the language model of a stock Qwen2-VL or Qwen2.5-VL.

    Args:
        text: the language model.
        head: the layer that computes logits.
        chunk: maximum number of prompt tokens per step.
    """

    def __init__(self, text: Any, head: nn.Module, chunk: int) -> None:
        super().__init__()
        self.text, self.head, self.chunk = text, head, chunk
        width = text.config.hidden_size // text.config.num_attention_heads
        width = getattr(text.config, "head_dim", None) or width
        self.rotary_emb = MRotaryEmbedding(
            width, width // 2, list(text.config.rope_parameters["mrope_section"])
        )
        self.pages: dict[Any, list[tuple[Tensor, Tensor]]] = {}  # by all that stands before their end
        self.computed = 0

    def serve(self, served: Any, ids: list[int], embeds: Tensor, tokens: list[int], **grids: Any) -> Tensor:
        """Return the logits (1 + n, vocabulary) after a prompt and after each of n further tokens."""
        positions, delta = served.positions(ids, **grids)
        # images count by value
        names = [(token, tuple(e.tolist())) for token, e in zip(ids, embeds, strict=True)]
        pages: list[tuple[Tensor, Tensor]] = []
        while (
            result := self.pages.get(tuple(names[: (len(pages) + 1) * BLOCK]))
        ) is not None and self.leaves_tokens(pages, ids):
            pages.append(result)  # type: ignore[arg-type]
        past = self.concatenate(pages)
        at = len(pages) * BLOCK
        hidden = embeds.new_zeros(0)
        while at < len(ids):
            end = min(at + self.chunk, len(ids))
            hidden, past = self.step(embeds[at:end], positions[:, at:end], past)
            at = end
        self.keep(names, past)
        logits = [self.head(hidden[-1])]
        for number, token in enumerate(tokens):
            # generated tokens are numbered on from the prompt, the same on all axes
            position = torch.full((len(positions), 1), len(ids) + number + delta)
            hidden, past = self.step(self.text.embed_tokens(torch.tensor([token])), position, past)
            logits.append(self.head(hidden[-1]))
        return torch.stack(logits)

    def leaves_tokens(self, pages: list[Any], ids: list[int]) -> bool:
        """Return whether one more page leaves a token to compute."""
        return (len(pages) + 1) * BLOCK < len(ids)

    def concatenate(self, pages: list[Any]) -> list[tuple[Tensor, Tensor]] | None:
        if not pages:
            return None
        return [
            (torch.cat([page[n][0] for page in pages]), torch.cat([page[n][1] for page in pages]))
            for n in range(len(self.text.layers))
        ]

    def keep(self, names: list[Any], past: list[tuple[Tensor, Tensor]]) -> None:
        for start in range(0, len(names) - BLOCK + 1, BLOCK):
            page = [(k[start : start + BLOCK], v[start : start + BLOCK]) for k, v in past]
            self.pages.setdefault(tuple(names[: start + BLOCK]), page)

    def step(
        self, x: Tensor, positions: Tensor, past: list[tuple[Tensor, Tensor]] | None
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Return the hidden states of some tokens, and all keys and values up to them."""
        self.computed += len(x)
        grown = []
        for number, layer in enumerate(self.text.layers):
            attention, y = layer.self_attn, layer.input_layernorm(x)
            q, k = self.rotary_emb(positions, attention.q_proj(y), attention.k_proj(y))
            v = attention.v_proj(y)
            if past is not None:
                k, v = torch.cat([past[number][0], k]), torch.cat([past[number][1], v])
            grown.append((k, v))
            x = x + attention.o_proj(self.attend(q, k, v))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.text.norm(x), grown

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        width = self.rotary_emb.head_size
        query, key, value = (x.view(len(x), -1, width).transpose(0, 1)[None] for x in (q, k, v))
        recorded = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        out = scaled_dot_product_attention(query, key, value, attn_mask=recorded, enable_gqa=True)
        return out[0].transpose(0, 1).reshape(q.shape)
