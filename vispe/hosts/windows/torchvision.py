"""torchvision's attention: Swin, which partitions its feature map into windows itself, and ViT."""

from __future__ import annotations

import torch
import torch.fx
from torch import Tensor
from torch.nn import functional as F

from vispe.errors import InputError
from vispe.hosts.common.block_loops import mask_of_torch
from vispe.hosts.common.layer_access import check_self_attention, is_plain_linear
from vispe.hosts.windows.attention import SiteAttention, cosine, split

Pair = tuple[int, int]


def window_layout(x: Tensor, window: Pair, shift: Pair) -> tuple[Pair, Pair]:
    """Return the number of windows of a feature map (b, h, w, d) and its shift, 0 along an axis with one window."""
    counts = ((x.shape[1] + window[0] - 1) // window[0], (x.shape[2] + window[1] - 1) // window[1])
    rolled = (shift[0] if counts[0] > 1 else 0, shift[1] if counts[1] > 1 else 0)
    return counts, rolled


@torch.fx.wrap
def window_partition(x: Tensor, window: Pair, shift: Pair) -> Tensor:
    """Return the windows (b windows, n, d) of a feature map (b, h, w, d), padded to complete windows and shifted."""
    (rows, columns), rolled = window_layout(x, window, shift)
    padded = F.pad(x, (0, 0, 0, -x.shape[2] % window[1], 0, -x.shape[1] % window[0]))
    if sum(rolled):
        padded = torch.roll(padded, (-rolled[0], -rolled[1]), (1, 2))
    tokens = padded.unflatten(2, (columns, window[1])).unflatten(1, (rows, window[0])).transpose(2, 3)
    return tokens.flatten(3, 4).flatten(0, 2)


@torch.fx.wrap
def window_reverse(out: Tensor, x: Tensor, window: Pair, shift: Pair) -> Tensor:
    """Return the feature map (b, h, w, d) of windows (b windows, n, d); the inverse of `window_partition`."""
    counts, rolled = window_layout(x, window, shift)
    out = out.unflatten(0, (x.shape[0], *counts)).unflatten(3, window).transpose(2, 3)
    out = out.flatten(3, 4).flatten(1, 2)
    if sum(rolled):
        out = torch.roll(out, rolled, (1, 2))
    return out[:, : x.shape[1], : x.shape[2]].contiguous()


@torch.fx.wrap
def window_shift_mask(x: Tensor, window: Pair, shift: Pair) -> Tensor | None:
    """Return the mask (windows, n, n) between parts of a window not adjacent in the feature map; None without shift.

    As in torchvision, masked logits get -100.
    """
    counts, rolled = window_layout(x, window, shift)
    if not sum(rolled):
        return None
    # along each axis three regions: all but the last window, its unshifted and its wrapped part
    regions: list[Tensor] = []
    for count, size, s in zip(counts, window, rolled, strict=True):
        index = torch.arange(count * size, device=x.device)
        regions.append(
            (index >= count * size - size).long() + (index >= count * size - s).long() * int(bool(s))
        )
    region = regions[0][:, None] * 3 + regions[1]
    region = region.unflatten(1, (counts[1], window[1])).unflatten(0, (counts[0], window[0])).transpose(1, 2)
    region = region.reshape(-1, window[0] * window[1])
    other = region[:, None] != region[:, :, None]
    return torch.zeros_like(other, dtype=x.dtype).masked_fill(other, -100.0)


class ShiftedAttention(SiteAttention):
    """Attention of torchvision's Swin and Swin V2, which partitions the feature map (b, h, w, d) itself."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the feature map (b, h, w, d) after attention."""
        layout = (tuple(self.window_size), tuple(self.shift_size))
        tokens = window_partition(x, *layout)
        bias = self.get_relative_position_bias() if self.vispe_grid.keep else None
        dropout, mask = self.attention_dropout if self.training else 0.0, window_shift_mask(x, *layout)
        out = self.vispe_attend(tokens, self.vispe_projected(tokens), layout[0], bias, dropout, mask)
        return window_reverse(F.dropout(self.proj(out), self.dropout, self.training), x, *layout)

    def vispe_projected(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values (b, h, n, d_h); keys of Swin V2 have no bias."""
        scale, bias = getattr(self, "logit_scale", None), self.qkv.bias
        if scale is None:
            return split(self.qkv(tokens), self.num_heads)
        of_keys = None
        if bias is not None:
            of_keys = F.pad(bias.unflatten(0, (3, -1))[1:2], (0, 0, 1, 1)).flatten()
        if is_plain_linear(self.qkv):
            qkv = F.linear(tokens, self.qkv.weight, bias if of_keys is None else bias - of_keys)
        else:  # adapters act when the layer is called
            qkv = self.qkv(tokens) if of_keys is None else self.qkv(tokens) - of_keys
        q, k, v = split(qkv, self.num_heads)
        return *cosine(q, k, scale), v


class GlobalAttention(SiteAttention):
    """torch's attention in torchvision's ViT, on the fixed grid of the model."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the tokens (b, n, d) after attention, and its weights if `need_weights`, as in torch.

        Raises:
            InputError: the call is not self-attention, or is causal without a mask.
        """
        check_self_attention(self.vispe_layer, (query, key, value), key_padding_mask)
        if is_causal and attn_mask is None:
            raise InputError(
                f"Attention of block {self.vispe_layer}: causal attention needs a mask, got is_causal=True without "
                "one. Pass the mask as attn_mask."
            )
        q, k, v = split(F.linear(query, self.in_proj_weight, self.in_proj_bias), self.num_heads)
        context = self.vispe_context(query, self.vispe_grid.grid, mask_of_torch(attn_mask, self.num_heads))
        if not need_weights:
            out = context.attend(self, q, k, v, query, self.dropout if self.training else 0.0)
            return self.out_proj(out.transpose(1, 2).flatten(2)), None
        scores = context.scores(self, (q,), (k,), v, query)
        weights = F.dropout(scores.softmax(), self.dropout, self.training)
        (out,) = scores.weigh(weights)
        weights = weights.mean(1) if average_attn_weights else weights
        return self.out_proj(out.transpose(1, 2).flatten(2)), weights.to(out.dtype)
