"""Dense masks of learned biases, kept while the numbers that they were made from stay the same.

In evaluation a learned table makes the same mask in every forward pass. The mask is kept with the positions, beside a
copy of the numbers, and serves as long as these are equal to the last bit: versions of parameters would not show what
`.data` or an optimiser in another process changed. A mask is kept from the second call on, so one forward pass costs
no memory; masks above `LARGEST` never are, and all together take at most `TOTAL`.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable

import torch
from torch import Tensor

from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.dense import SumBias
from vispe.attention.bias.distance_bias import DistanceBias
from vispe.attention.bias.lower_to_table import not_a_table, table_of
from vispe.attention.bias.offset import OffsetBias
from vispe.attention.bias.radial import RadialBias
from vispe.attention.bias.table import ProfileBias, TableBias
from vispe.attention.precision import no_autocast, no_infinity, readable, rounded
from vispe.grid import Positions

LARGEST = 64 << 20  # bytes of one mask
TOTAL = 1 << 30  # bytes of all masks, whatever models and grids they belong to
_Numbers = tuple[Tensor, ...]


class Kept:
    """One learned bias on one grid: its numbers, its mask, and the calls that were checked with it.

    Attributes:
        mask: (1, h or 1, n, n) in the dtype of attention; None while the bias was seen once, or where there is no room.
        finite: whether the mask holds no infinity.
        checked: shapes and dtypes of calls that need nothing but this mask.
    """

    __slots__ = ("checked", "finite", "mask", "numbers", "rule", "used")

    def __init__(self, rule: Hashable, numbers: _Numbers, used: int) -> None:
        self.rule, self.numbers, self.used = rule, numbers, used
        self.mask: Tensor | None = None
        self.finite = False
        self.checked: set[Hashable] = set()


class _Masks:
    """What is kept for the positions of one grid: usually one mask for each layer, asked for in turn."""

    __slots__ = ("__weakref__", "clock", "entries", "last")

    def __init__(self) -> None:
        self.entries: list[Kept] = []
        self.clock, self.last = 0, -1
        _EVERY.add(self)

    def __reduce__(self) -> tuple[type[_Masks], tuple[()]]:
        """Copies and pickles of positions begin without masks, which would be counted nowhere."""
        return _Masks, ()

    @property
    def bytes(self) -> int:
        return sum(e.mask.nbytes for e in self.entries if e.mask is not None)

    def find(self, rule: Hashable, numbers: _Numbers) -> Kept | None:
        """Return the entry of equal numbers, or None; layers come in turn, so the one after the last is tried first."""
        self.clock += 1
        entries = self.entries
        for step in range(1, len(entries) + 1):
            place = (self.last + step) % len(entries)
            entry = entries[place]
            if entry.rule == rule and all(map(torch.equal, entry.numbers, numbers)):
                self.last, entry.used = place, self.clock
                return entry
        return None

    def add(self, rule: Hashable, numbers: _Numbers) -> None:
        """Remember numbers that were seen for the first time; what no call has asked for lately is dropped."""
        oldest = self.clock - 2 * len(self.entries) - 16
        copies = tuple(t.detach().clone() for t in numbers)
        self.entries = [e for e in self.entries if e.used >= oldest] + [Kept(rule, copies, self.clock)]
        self.last = len(self.entries) - 1


_EVERY: weakref.WeakSet[_Masks] = weakref.WeakSet()


def keepable(bias: Bias, dtype: torch.dtype, heads: int) -> bool:
    """Whether the mask of a bias may be kept by its numbers: they are on the CPU, and it is not too large."""
    pos = bias.pos
    if pos is None or pos.memo is None or bias.key is not None or not_a_table(bias) is not None:
        return False
    return _bound_alike(bias, pos) and _size(bias, dtype, heads) <= LARGEST and readable(pos.coords)


def keeps(bias: Bias, dtype: torch.dtype, heads: int) -> bool:
    """Whether the mask of a learned bias is kept: no gradient is wanted now."""
    return _asked(bias, dtype, heads) is not None


def look(bias: Bias, dtype: torch.dtype, heads: int) -> Kept | None:
    """Return what is kept of a learned bias, or None."""
    asked = _asked(bias, dtype, heads)
    return None if asked is None else asked[0].find(*asked[1])


def mask(bias: Bias, dtype: torch.dtype, heads: int) -> Tensor | None:
    """Return the mask of a learned bias, made now and kept if it was seen before; None where a caller has to make it.

    Args:
        bias: the bias.
        dtype: of attention.
        heads: h.
    """
    asked = _asked(bias, dtype, heads)
    if asked is None:
        return None
    masks, numbers = asked
    entry = masks.find(*numbers)
    if entry is None:
        with torch.inference_mode(False):
            masks.add(*numbers)
        return None
    if entry.mask is None and _room(masks, _size(bias, dtype, heads)):
        # what is made while predicting must serve training too
        with torch.inference_mode(False), torch.no_grad(), no_autocast(numbers[1][0].device):
            entry.mask = rounded(bias.dense(), dtype)
            entry.finite = no_infinity(entry.mask)
    return entry.mask


def _asked(bias: Bias, dtype: torch.dtype, heads: int) -> tuple[_Masks, tuple[Hashable, _Numbers]] | None:
    """Return where the mask of a bias is kept, and by what; None for a bias that needs a gradient or is no table."""
    if not keepable(bias, dtype, heads) or bias.pos is None or bias.pos.memo is None:
        return None
    with no_autocast(bias.pos.coords.device):
        rule, numbers = _numbers(bias)
    if any(not readable(t) or (t.requires_grad and torch.is_grad_enabled()) for t in numbers):
        return None
    found = bias.pos.memo.get(("learned masks", dtype))
    if found is None:
        found = bias.pos.memo[("learned masks", dtype)] = _Masks()
    return found, ((rule, *(t.dtype for t in numbers)), numbers)


def _bound_alike(bias: Bias, pos: Positions) -> bool:
    """Whether all terms are bound to the positions that keep the mask; others would decide it, too."""
    return all(_bound_alike(t, pos) for t in bias.terms) if isinstance(bias, SumBias) else bias.pos is pos


def _size(bias: Bias, dtype: torch.dtype, heads: int) -> int:
    """Return the bytes of a mask."""
    tokens = 0 if bias.pos is None else bias.pos.tokens
    return (heads if bias.per_head else 1) * tokens**2 * dtype.itemsize


def _room(masks: _Masks, wanted: int) -> bool:
    """Whether there is room for one more mask, where need be after those of other grids are given up."""
    if masks.bytes + wanted > TOTAL:
        return False
    others = [m for m in _EVERY if m is not masks]
    if sum(m.bytes for m in others) + masks.bytes + wanted > TOTAL:
        for other in others:
            other.entries = []
    return True


def _numbers(bias: Bias) -> tuple[Hashable, _Numbers]:
    """Return what a bias that is a table is made from: words that two must share, and tensors."""
    if isinstance(bias, SumBias):
        rules, numbers = zip(*map(_numbers, bias.terms), strict=True)
        return rules, tuple(t for some in numbers for t in some)
    if type(bias) is TableBias:
        given = [bias.values] if bias.prefix is None else [bias.values, bias.prefix]
        return len(given), tuple(given)
    if type(bias) is ProfileBias and bias.profile.prefix is None:
        return "profile", (bias.slopes, bias.profile.values)
    if type(bias) is DistanceBias and isinstance(bias.slopes, Tensor):
        return (bias.spacing, *bias.rule), (bias.slopes,)
    if isinstance(bias, OffsetBias | RadialBias) and bias.made_of is not None:
        words, tensors = bias.made_of
        return (bias.spacing, bias.wrap if isinstance(bias, OffsetBias) else bias.rule, words), tensors
    table, edge = table_of(bias)
    return type(bias), (table,) if edge is None else (table, edge)
