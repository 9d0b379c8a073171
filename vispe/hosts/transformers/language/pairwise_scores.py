"""Attention logits of a language model that are computed per pair of tokens: PINE and SelfExtend."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from vispe.attention import attention
from vispe.encodings.parts.rotary.pairwise.pairwise_scores import PairwiseRotaryScores
from vispe.encodings.parts.rotary.pairwise.pine import PineScores
from vispe.encodings.parts.rotary.pairwise.self_extend import SelfExtendScores
from vispe.hosts.transformers.language.parallel_sets import EXTENT, MOVED
from vispe.multimodal.streams.parallel_segments import MEMBER, SET


class PairwiseLogits(NamedTuple):
    """Arguments of pairwise logits, except queries and keys; a tuple, so that hooks move it between devices.

    Attributes:
        kind: 'pine' or 'self_extend'.
        options: arguments of the scores.
    """

    kind: str
    options: dict[str, Any]

    def scores(self) -> PairwiseRotaryScores:
        """Return the function that computes the logits."""
        return (PineScores if self.kind == "pine" else SelfExtendScores)(**self.options)


def rates_of(frequencies: Tensor, axis_of_pair: Tensor, axes: int) -> Tensor:
    """Return radians per step of every axis for each channel pair, (key heads or 1, axes, pairs) float64."""
    by_head = axis_of_pair if axis_of_pair.ndim == 2 else axis_of_pair[None]
    axis = torch.arange(axes, device=by_head.device)[:, None]
    return (by_head[:, None] == axis) * frequencies.double()


def ordered(
    queries: Tensor, keys: Tensor, rates: Tensor, factor: float, token_attributes: Tensor
) -> PairwiseLogits:
    """Return the logits of PINE for the attributes (k, b, m) of all tokens, the queries last."""
    n, m = queries.shape[1], keys.shape[1]
    member = token_attributes[[SET, MEMBER]].long()
    moved = token_attributes[MOVED:].movedim(0, -1)
    options = {
        "queries": queries,
        "keys": keys,
        "rates": rates,
        "own": member[:, :, m - n :],
        "member": member,
    }
    return PairwiseLogits(
        "pine", {**options, "extent": token_attributes[EXTENT], "moved": moved, "factor": factor}
    )


def extended(
    queries: Tensor, keys: Tensor, rates: Tensor, factor: float, group: int, window: int
) -> PairwiseLogits | None:
    """Return the logits of SelfExtend; None if all tokens are within the window, so that no token is grouped."""
    # offsets of fractional positions may be rounded to less than the window
    if not bool((keys.amax(1) - keys.amin(1) >= window - 1e-3).any()):
        return None
    options = {"queries": queries, "keys": keys, "rates": rates, "factor": factor}
    return PairwiseLogits("self_extend", {**options, "group": group, "window": window})


def attend_pairwise(
    module: Any,
    pairwise: PairwiseLogits,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float | None,
) -> Tensor:
    """Return attention (b, n, h, d) with pairwise logits; masks are those of the host's SDPA.

    Args:
        module: the attention layer.
        pairwise: arguments of the logits.
        q: queries (b, h, n, d) without rotation.
        k: keys (b, h_kv, m or more, d); a static cache is longer than its m keys.
        v: values of the shape of `k`.
        mask: bool or additive (b, 1, n, m or more), or None, which means causal attention if there are
            queries for all tokens.
        scale: factor of the logits.
    """
    m = pairwise.options["keys"].shape[1]
    k, v = k[:, :, :m], v[:, :, :m]
    causal = mask is None and q.shape[2] == m
    mask = None if mask is None else mask[..., :m]
    grouped = q.shape[1] != k.shape[1]
    # a dense mask would round these logits to half precision
    out = attention(
        q, k, v, backend="reference", bias=pairwise.scores(), attn_mask=mask, is_causal=causal, scale=scale,
        enable_gqa=grouped, dropout_p=module.attention_dropout if module.training else 0.0,
    )  # fmt: skip
    return out.transpose(1, 2).contiguous()
