"""Memories beside the keys of a sequence: the most alike join the softmax of each query (Extended Mind)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from vispe.attention.backends.reference import logits, weighted
from vispe.attention.call import Call
from vispe.attention.precision import at_least_float32, no_autocast
from vispe.attention.transform.abstract_transform import Transform
from vispe.errors import OptionError, ShapeError, UnsupportedCombination, is_whole

Place = Literal["origin", "far", "own"]
Mode = Literal["unturned", "reference"]


@dataclass(frozen=True, eq=False)
class Memories:
    """Keys and values of other texts or images, kept as they are before rotation.

    Attributes:
        keys: (b or 1, h_kv, m, d), without rotation.
        values: (b or 1, h_kv, m, d_v).
        place: where they are. ``'origin'``: at position 0, as the authors have it; the distance to them grows with the
            place of the query. ``'far'``: at one distance from all queries. ``'own'``: each at its place in its own
            image. Where directions mean nothing, as in micrographs, take ``'far'`` with no transform at all.
        transform: for ``'own'`` the rotation by the coordinates of the memories (of n = m tokens), for ``'far'`` that
            of all queries by one distance (of n = 1 token); None turns neither.
        bias: added to their logits (h or 1, 1, 1): see `memory_bias`.
    """

    keys: Tensor
    values: Tensor
    place: Place = "origin"
    transform: Transform | None = None
    bias: Tensor | None = None

    def __post_init__(self) -> None:
        if self.place not in ("origin", "far", "own"):
            raise OptionError(f"place is 'origin', 'far' or 'own', got {self.place!r}.")
        if (self.place == "origin" and self.transform is not None) or (
            self.place == "own" and self.transform is None
        ):
            raise OptionError(
                f"place={self.place!r} got transform={type(self.transform).__name__}; 'origin' turns nothing, 'own' "
                "needs the rotation of the memories, 'far' takes that of the queries or none."
            )
        if self.keys.ndim != 4 or self.keys.shape[:3] != self.values.shape[:3]:
            raise ShapeError(
                f"Memories needs keys and values (b, h_kv, m, d), got {tuple(self.keys.shape)} and "
                f"{tuple(self.values.shape)}."
            )


def memory_bias(slopes: Tensor, length: int) -> Tensor:
    """Return ``-slope * length`` (h, 1, 1): with ALiBi all memories are one step beyond the whole context.

    Args:
        slopes: of the heads (h,).
        length: tokens so far, those in the cache included.
    """
    return -(slopes * length)[:, None, None]


def attend_with_memories(
    call: Call, memories: Memories, *, topk: int, threshold: float | None = None, mode: Mode = "unturned"
) -> Tensor:
    """Return attention (b, h, n, d_v) in which each query takes the `topk` memories that are most alike, too.

    Alike is by cosine; own keys and memories share one softmax. A row without own keys attends to its memories alone.

    Args:
        call: the arguments of attention, see `vispe.attention.attention`; its transform turns queries and own keys.
        memories: what may be taken.
        topk: how many, for each query of each head; all where there are fewer.
        threshold: memories whose cosine is not above are left out.
        mode: what is compared: queries and keys before rotation (``'unturned'``), or, as the authors do, turned queries
            with unturned keys (``'reference'``), where what is chosen depends on the place of the query.

    Raises:
        OptionError: `topk` is no whole number above 0, or there is no such mode.
        ShapeError: memories are for other heads, widths or samples.

    Example:
        >>> import torch
        >>> q = torch.randn(1, 4, 5, 8)
        >>> k, bank = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 30, 8)
        >>> call = Call(q, k, k, is_causal=True, enable_gqa=True)
        >>> attend_with_memories(call, Memories(bank, bank), topk=3).shape
        torch.Size([1, 4, 5, 8])
    """
    _check(call, memories, topk, mode)
    with no_autocast(call.q.device):
        own, dead = logits(call)
        if dead is not None:
            own = own.masked_fill(dead, -torch.inf)
        groups = call.q.shape[1] // call.k.shape[1]
        # grouped queries share keys, yet each head chooses for itself
        keys, values = (
            at_least_float32(x).expand(len(call.q), -1, -1, -1).repeat_interleave(groups, 1)
            for x in (memories.keys, memories.values)
        )
        raw = at_least_float32(call.q)
        turned = raw if call.transform is None else call.transform.query(raw)
        cosine = F.normalize(turned if mode == "reference" else raw, dim=-1) @ F.normalize(
            keys, dim=-1
        ).transpose(-1, -2)
        chosen = cosine.topk(min(topk, keys.shape[2]), -1).indices
        taken = torch.zeros_like(cosine, dtype=torch.bool).scatter_(-1, chosen, True)
        if threshold is not None:
            taken = taken & (cosine > threshold)
        product = call.factor * _product(memories, raw, turned, keys)
        if memories.bias is not None:
            product = product + memories.bias
        joined = torch.cat([product.masked_fill(~taken, -torch.inf), own], -1)
        # a row that sees nothing at all is 0, as everywhere
        nothing = (joined == -torch.inf).all(-1, keepdim=True)
        attn = joined.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0)
        count = keys.shape[2]
        mine = weighted(call, attn[..., count:])
        return mine + (attn[..., :count] @ values.to(attn)).to(mine)


def _product(memories: Memories, raw: Tensor, turned: Tensor, keys: Tensor) -> Tensor:
    """Return ``q . k`` (b, h, n, m) of queries and memories at their place."""
    if memories.place == "own" and memories.transform is not None:
        keys = memories.transform.key(keys)
    if memories.place == "far":
        turned = raw if memories.transform is None else memories.transform.query(raw)
    return turned @ keys.transpose(-1, -2)


def _check(call: Call, memories: Memories, topk: object, mode: object) -> None:
    if not is_whole(topk) or topk < 1:  # type: ignore[operator]
        raise OptionError(f"topk needs a whole number of memories above 0, got {topk!r}.")
    if mode not in ("unturned", "reference"):
        raise OptionError(f"mode is 'unturned' or 'reference', got {mode!r}.")
    b, heads, _, width = call.k.shape
    found = memories.keys.shape
    if found[0] not in (1, b) or (found[1], found[3]) != (heads, width) or not found[2]:
        raise ShapeError(
            f"The keys are {tuple(call.k.shape)}, but those of memories {tuple(found)}; they need as many samples (or "
            "1), heads and channels, and one memory at least."
        )
    if memories.values.shape[3] != call.v.shape[3]:
        raise ShapeError(
            f"Values have {call.v.shape[3]} channels, those of memories {memories.values.shape[3]}."
        )
    if call.dropout_p or (call.transform is not None and call.transform.changes_values):
        raise UnsupportedCombination(
            "Memories go with neither dropout of attention nor transforms of values; leave them out."
        )
