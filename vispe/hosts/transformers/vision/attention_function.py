"""Attention of a converted layer of a vision tower with a mask of transformers, and its weights if it is eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import dropout

from vispe.errors import UnsupportedCombination
from vispe.hosts.common.context import Context
from vispe.hosts.transformers.vision.families import heads_of


def attended(
    module: Any,
    context: Context,
    x: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    rotate: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return attention (b, n, d) and, if eager, its weights; `rotate` applies the host's own RoPE."""
    if mask is not None:
        context = context.masked(as_attention_mask(mask))
    heads, _ = heads_of(module)
    q, k, v = (rearrange(t, "b n (h d) -> b h n d", h=heads) for t in (q, k, v))
    if rotate is not None:
        q, k = rotate(q, k)
    dropout_p = dropout_p if module.training else 0.0
    if module.fused_attn:
        out, weights = context.attend(module, q, k, v, x, dropout_p), None
    else:  # the returned weights are those of the output, so that gradients reach them
        scores = context.scores(module, (q,), (k,), v, x)
        weights = dropout(scores.softmax(), dropout_p).to(q.dtype)
        (out,) = scores.weigh(weights)
    return rearrange(out, "b h n d -> b n (h d)"), weights


def as_attention_mask(mask: Any) -> Tensor:
    """Return a mask of transformers as (b, 1, 1 or n, n); masks of flash attention are (b, n).

    The lowest number of the dtype, with which transformers hides keys in 'eager', becomes -inf: a query to which an
    encoding leaves no other key would attend to these.

    Raises:
        UnsupportedCombination: the mask is not a tensor.
    """
    if not isinstance(mask, Tensor):
        raise UnsupportedCombination(
            f"The mask of the attention implementation must be a tensor, got {type(mask).__name__}. Call "
            "model.set_attn_implementation('sdpa'); vispe selects the fastest kernel itself."
        )
    if mask.ndim == 2:
        return mask[:, None, None].bool()
    if not mask.is_floating_point():
        return mask
    return mask.masked_fill(mask == torch.finfo(mask.dtype).min, float("-inf"))
