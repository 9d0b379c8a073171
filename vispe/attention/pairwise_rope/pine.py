"""PINE: segments without an order stand behind one another as their importance for each query says."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from vispe.attention.pairwise_rope.pairwise_scores import TurnedScores
from vispe.attention.transform.abstract_transform import Layout
from vispe.errors import ShapeError, UnsupportedCombination


class OrderedScores(TurnedScores):
    """Rotary logits in which each query, in each head, puts what matters most to it nearest (PINE, arXiv 2407.01100).

    Segments of a set end at one position. For a query inside segment i the keys of every other one are moved back by
    the lengths of the segments that matter more, i itself first; for a query outside, by those that matter more to it.
    How much segment j matters is the mean over its keys of ``softmax(scale q . k)``, without rotation, over the keys
    of the set, for a segment i summed over its queries and without its own keys. Equals keep the order of the input.

    Args:
        queries, keys, rates, layout, factor: see `TurnedScores`.
        own: set and member of each query (2, b or 1, n), -1 outside of sets.
        member: set and member of each key (2, b or 1, m); members count from 0.
        extent: length of the member of each key (b or 1, m), in steps.
        moved: which axes of each key move with its member (b or 1, m, axes), 0 or 1; all by default.

    Raises:
        ShapeError: shapes disagree.
        UnsupportedCombination: gradients are asked for; the order has none.

    Example:
        >>> import torch
        >>> from vispe.attention import attention
        >>> x, at = torch.randn(1, 2, 5, 4), torch.tensor([[[2.0], [3.0], [2.0], [3.0], [4.0]]])
        >>> member = torch.tensor([[[0, 0, 0, 0, -1]], [[0, 0, 1, 1, -1]]])
        >>> bias = OrderedScores(at, at, torch.tensor([[[1.0, 0.1]]]), member, member, torch.full((1, 5), 2.0))
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
                f"OrderedScores needs own (2, b, {n}), member (2, b, {m}) and extent (b, {m}), got {tuple(own.shape)}, "
                f"{tuple(member.shape)} and {tuple(extent.shape)}."
            )
        self.own, self.member, self.extent = own, member, extent.double()
        self.moved = torch.ones_like(self.keys) if moved is None else moved.to(self.keys)

    def scores(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        """Return the logits (b, h, n, m)."""
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad):
            raise UnsupportedCombination(
                "PINE sorts segments by their importance, which has no gradient; run it under torch.no_grad(), and "
                "train with Parallel(see='all') alone."
            )
        b = len(q)
        turned = self.turn(k, self.keys)
        logits = self.turn(q, self.queries) @ turned.transpose(-1, -2)
        each = [x.expand(b, *x.shape[1:]) for x in (self.queries, self.extent, self.moved)]
        own, member = (x.expand(2, b, -1) for x in (self.own, self.member))
        for row in range(b):
            for number in range(int(member[0, row].max()) + 1):
                at = (member[0, row] == number).nonzero()[:, 0]
                if not len(at):
                    continue
                inside = torch.where(own[0, row] == number, own[1, row], -1)
                of_key, extent = member[1, row, at], each[1][row, at]
                raw = scale * q[row] @ k[row, :, at].transpose(-1, -2)
                shift = shifts(raw, inside, of_key, extent)
                part = _moved(self, q[row], turned[row, :, at], each[0][row], shift, of_key, each[2][row, at])
                logits[row, :, :, at] = part
        return scale * logits


def _moved(
    scores: OrderedScores, q: Tensor, k: Tensor, at: Tensor, shift: Tensor, of_key: Tensor, axes: Tensor
) -> Tensor:
    """Return products (h, n, keys of a set) of queries (h, n, d) with turned keys (h, keys, d) that are moved back.

    A key that is `shift` (h, n, members) behind is met by a query that is as much ahead, so queries turn, not keys.
    """
    out = q.new_empty(*q.shape[:2], len(of_key))
    found: Any = cast("Any", axes).unique(dim=0, return_inverse=True)  # torch does not say its types
    kinds, of_kind = cast("tuple[Tensor, Tensor]", found)
    for j in range(shift.shape[2]):
        for number, kind in enumerate(kinds.unbind()):
            here = ((of_key == j) & (of_kind == number)).nonzero()[:, 0]
            if len(here):
                ahead = at + shift[:, :, j, None] * kind
                out[:, :, here] = scores.turn(q[None], ahead[None])[0] @ k[:, here].transpose(-1, -2)
    return out


def shifts(raw: Tensor, inside: Tensor, of_key: Tensor, extent: Tensor) -> Tensor:
    """Return how far each query, in each head, moves each member back (h, n, members), float64.

    Args:
        raw: logits without rotation of all queries and the keys of one set (h, n, keys).
        inside: member of each query (n), -1 outside of the set.
        of_key: member of each key (keys), from 0 on.
        extent: length of the member of each key (keys).
    """
    members = int(of_key.max()) + 1
    hot = torch.nn.functional.one_hot(of_key, members).to(raw)
    mean = hot / hot.sum(0).clamp(min=1)
    # the mean weight of the keys of a member, for each query by itself
    matter = raw.softmax(-1) @ mean
    for i in range(members):
        mine = (inside == i).nonzero()[:, 0]
        others = of_key != i
        if not len(mine) or not bool(others.any()):
            continue
        # queries of a member decide together, by the keys of the others
        apart = raw[:, mine].masked_fill(~others, -torch.inf).softmax(-1) @ mean
        total = apart.sum(1, keepdim=True).expand(-1, len(mine), -1).clone()
        total[..., i] = torch.inf
        matter[:, mine] = total
    order = matter.argsort(dim=-1, descending=True, stable=True)
    length = extent.new_zeros(members).index_copy_(0, of_key, extent)
    placed = length[order]
    # what comes first in the order stands nearest, and moves the rest back by its length
    behind = placed.cumsum(-1) - placed
    return torch.zeros_like(behind).scatter_(-1, order, behind)
