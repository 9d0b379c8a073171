"""Logits of a language model that one rotation of queries and keys does not make: PINE and SelfExtend."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from vispe.attention import attention
from vispe.attention.pairwise_rope.pairwise_scores import TurnedScores
from vispe.attention.pairwise_rope.pine import OrderedScores
from vispe.attention.pairwise_rope.self_extend import GroupedScores
from vispe.hosts.transformers.language.parallel_sets import EXTENT, MOVED
from vispe.multimodal.streams.parallel_segments import MEMBER, SET


class Apart(NamedTuple):
    """What logits are made of, beside queries and keys; a tuple, so that hooks move it to the device of a layer.

    Attributes:
        kind: name of the logits.
        options: their arguments.
    """

    kind: str
    options: dict[str, Any]

    def scores(self) -> TurnedScores:
        """Return the logits."""
        return (OrderedScores if self.kind == "pine" else GroupedScores)(**self.options)


def rates_of(frequencies: Tensor, axis_of_pair: Tensor, axes: int) -> Tensor:
    """Return radians per step of every axis for each pair of channels, (key heads or 1, axes, pairs) float64."""
    named = axis_of_pair if axis_of_pair.ndim == 2 else axis_of_pair[None]
    number = torch.arange(axes, device=named.device)[:, None]
    return (named[:, None] == number) * frequencies.double()


def ordered(queries: Tensor, keys: Tensor, rates: Tensor, factor: float, marks: Tensor) -> Apart:
    """Return the logits of PINE for the marks (rows, b, m) of all tokens, the queries last."""
    n, m = queries.shape[1], keys.shape[1]
    member = marks[[SET, MEMBER]].long()
    moved = marks[MOVED:].movedim(0, -1)
    options = {
        "queries": queries,
        "keys": keys,
        "rates": rates,
        "own": member[:, :, m - n :],
        "member": member,
    }
    return Apart("pine", {**options, "extent": marks[EXTENT], "moved": moved, "factor": factor})


def extended(
    queries: Tensor, keys: Tensor, rates: Tensor, factor: float, group: int, window: int
) -> Apart | None:
    """Return the logits of SelfExtend; None where all tokens are within the window, so that nothing is grouped."""
    if not bool((keys.amax(1) - keys.amin(1) >= window).any()):
        return None
    options = {"queries": queries, "keys": keys, "rates": rates, "factor": factor}
    return Apart("self_extend", {**options, "group": group, "window": window})


def attend_apart(
    module: Any, apart: Apart, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None
) -> Tensor:
    """Return attention (b, n, h, d) with logits of their own; the signature of masks is that of the host's SDPA.

    Args:
        module: the attention layer.
        apart: what logits are made of.
        q: queries (b, h, n, d) without rotation.
        k: keys (b, h_kv, m or more, d): a cache of fixed size has room behind them.
        v: values, likewise.
        mask: bool or additive (b, 1, n, m or more), or None: causal where queries are all tokens.
        scale: factor of the logits.
    """
    m = apart.options["keys"].shape[1]
    k, v = k[:, :, :m], v[:, :, :m]
    causal = mask is None and q.shape[2] == m
    mask = None if mask is None else mask[..., :m]
    grouped = q.shape[1] != k.shape[1]
    # one dense mask would round these logits to half precision, where they are all there is
    out = attention(
        q, k, v, backend="reference", bias=apart.scores(), attn_mask=mask, is_causal=causal, scale=scale,
        enable_gqa=grouped, dropout_p=module.attention_dropout if module.training else 0.0,
    )  # fmt: skip
    return out.transpose(1, 2).contiguous()
