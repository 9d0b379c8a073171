"""PINE: segments of an unordered set are re-ordered per query by importance."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from vispe.attention.transform.abstract_transform import Layout
from vispe.encodings.parts.rotary.pairwise.pairwise_scores import PairwiseRotaryScores
from vispe.errors import ShapeError, UnsupportedCombination


class PineScores(PairwiseRotaryScores):
    """Rotary logits in which segments are sorted per query and head, the most important nearest (arXiv 2407.01100).

    All segments of a set end at the same position. For a query in segment i, the keys of every other segment are moved
    back by the lengths of the more important segments, i itself first; for a query outside of the set, by those that
    are more important to it. The importance of segment j is the mean over its keys of ``softmax(scale q . k)``, without
    rotation, over the keys of the set; for segment i it is summed over its queries and excludes its own keys. Ties keep
    the order of the input.

    Args:
        queries, keys, rates, layout, factor: see `PairwiseRotaryScores`.
        own: set and segment index of each query (2, b or 1, n), -1 outside of sets.
        member: set and segment index of each key (2, b or 1, m), segments from 0.
        extent: length of the segment of each key (b or 1, m), in steps.
        moved: 1 for the axes along which a key moves with its segment, else 0, (b or 1, m, axes); all by default.

    Raises:
        ShapeError: shapes disagree.
        UnsupportedCombination: on use with gradients, since sorting has none.

    Example:
        >>> import torch
        >>> from vispe.attention import attention
        >>> x, at = torch.randn(1, 2, 5, 4), torch.tensor([[[2.0], [3.0], [2.0], [3.0], [4.0]]])
        >>> member = torch.tensor([[[0, 0, 0, 0, -1]], [[0, 0, 1, 1, -1]]])
        >>> bias = PineScores(at, at, torch.tensor([[[1.0, 0.1]]]), member, member, torch.full((1, 5), 2.0))
        >>> attention(x, x, x, bias=bias).shape
        torch.Size([1, 2, 5, 4])
    """

    __slots__ = ("extent", "member", "moved", "own")

    def __init__(
        self,
        queries: Tensor,
        keys: Tensor,
        rates: Tensor,
        own: Tensor,
        member: Tensor,
        extent: Tensor,
        moved: Tensor | None = None,
        layout: Layout = "half",
        factor: float = 1.0,
    ) -> None:
        super().__init__(queries, keys, rates, layout, factor)
        n, m = queries.shape[1], keys.shape[1]
        if own.shape[0::2] != (2, n) or member.shape[0::2] != (2, m) or extent.shape[1:] != (m,):
            raise ShapeError(
                f"PineScores needs own (2, b, {n}), member (2, b, {m}) and extent (b, {m}), got {tuple(own.shape)}, "
                f"{tuple(member.shape)} and {tuple(extent.shape)}."
            )
        self.own, self.member, self.extent = own, member, extent.double()
        self.moved = torch.ones_like(self.keys) if moved is None else moved.to(self.keys)

    def scores(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        """Return the logits (b, h, n, m)."""
        # argsort has no gradient
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad):
            raise UnsupportedCombination(
                "PineScores (PINE) sorts segments by importance, which has no gradient. Use torch.no_grad(), and "
                "train with Parallel(see='all') alone."
            )
        b = len(q)
        rotated_k = self.rotate(k, self.keys)
        logits = self.rotate(q, self.queries) @ rotated_k.transpose(-1, -2)
        expanded = [x.expand(b, *x.shape[1:]) for x in (self.queries, self.extent, self.moved)]
        query_sets, key_sets = (x.expand(2, b, -1) for x in (self.own, self.member))
        for sample in range(b):
            for set_index in range(int(key_sets[0, sample].max()) + 1):
                keys = (key_sets[0, sample] == set_index).nonzero()[:, 0]
                if not len(keys):
                    continue
                inside = torch.where(query_sets[0, sample] == set_index, query_sets[1, sample], -1)
                of_key, extent = key_sets[1, sample, keys], expanded[1][sample, keys]
                # importance is measured without rotation
                unrotated = scale * q[sample] @ k[sample, :, keys].transpose(-1, -2)
                shift = shifts(unrotated, inside, of_key, extent)
                products = _moved_products(
                    self,
                    q[sample],
                    rotated_k[sample, :, keys],
                    expanded[0][sample],
                    shift,
                    of_key,
                    expanded[2][sample, keys],
                )
                logits[sample, :, :, keys] = products
        return scale * logits


def _moved_products(
    scores: PineScores, q: Tensor, k: Tensor, coords: Tensor, shift: Tensor, of_key: Tensor, axes: Tensor
) -> Tensor:
    """Return products (h, n, keys of a set) of queries (h, n, d) with rotated keys (h, keys, d) moved back.

    Moving a key back by `shift` (h, n, members) equals moving the query ahead, so queries are rotated instead of keys.
    """
    out = q.new_empty(*q.shape[:2], len(of_key))
    unique: Any = cast("Any", axes).unique(dim=0, return_inverse=True)  # untyped in torch
    patterns, pattern_of_key = cast("tuple[Tensor, Tensor]", unique)
    for j in range(shift.shape[2]):
        for pattern_index, pattern in enumerate(patterns.unbind()):
            keys = ((of_key == j) & (pattern_of_key == pattern_index)).nonzero()[:, 0]
            if len(keys):
                ahead = coords + shift[:, :, j, None] * pattern
                out[:, :, keys] = scores.rotate(q[None], ahead[None])[0] @ k[:, keys].transpose(-1, -2)
    return out


def shifts(raw: Tensor, inside: Tensor, of_key: Tensor, extent: Tensor) -> Tensor:
    """Return the distance by which each query, in each head, moves each segment back (h, n, members), float64.

    Args:
        raw: unrotated logits of all queries and the keys of one set (h, n, keys).
        inside: segment of each query (n), -1 outside of the set.
        of_key: segment of each key (keys), from 0.
        extent: length of the segment of each key (keys).
    """
    members = int(of_key.max()) + 1
    # (keys, members), normalised to the mean over the keys of each member
    hot = torch.nn.functional.one_hot(of_key, members).to(raw)
    mean = hot / hot.sum(0).clamp(min=1)
    # importance (h, n, members): the mean weight of the keys of a segment, for each query separately
    importance = raw.softmax(-1) @ mean
    for i in range(members):
        queries = (inside == i).nonzero()[:, 0]
        others = of_key != i
        if not len(queries) or not bool(others.any()):
            continue
        # queries of a segment share one order, by their total weight on the keys of the others
        weights = raw[:, queries].masked_fill(~others, -torch.inf).softmax(-1) @ mean
        total = weights.sum(1, keepdim=True).expand(-1, len(queries), -1).clone()
        total[..., i] = torch.inf
        importance[:, queries] = total
    order = importance.argsort(dim=-1, descending=True, stable=True)
    length = extent.new_zeros(members).index_copy_(0, of_key, extent)
    sorted_length = length[order]
    # the most important segment is nearest and moves all others back by its length: exclusive cumulative sum
    offset = sorted_length.cumsum(-1) - sorted_length
    return torch.zeros_like(offset).scatter_(-1, order, offset)
