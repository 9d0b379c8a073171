"""Entries of the caches of learned biases: what a bias was created from, and the mask or strip computed from it.

Masks and strips are cached from the second call on, so a single forward pass costs no memory. Those above
`MAX_MASK_BYTES` are never cached, and all together have at most `MAX_TOTAL_BYTES`. Masks and strips of fixed biases are
cached with the positions by `Bias.key`.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable

import torch
from torch import Tensor

from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.dense import SumBias
from vispe.attention.bias.distance_bias import DistanceBias
from vispe.attention.bias.functions import FunctionBias
from vispe.attention.bias.table import ProfileBias, TableBias
from vispe.grid import Positions

MAX_MASK_BYTES = 64 << 20  # bytes of one mask
MAX_TOTAL_BYTES = 1 << 30  # bytes of all masks, whatever models and grids they belong to
MAX_ENTRIES = 128  # biases on one grid; more than any model has layers
Parameters = tuple[Tensor, ...]
# runs, prefix biases, float16 copy, visible offsets
Strip = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


class CacheEntry:
    """Cache entry of one learned bias on one grid.

    Attributes:
        mask: (1, h or 1, n, n) in the dtype of attention, from `precision.rounded`; None after the first call, or if
            the cache is full.
        strip: for entries of the fused kernels, instead of a mask; None after the first call, or if the cache is full.
        is_open: whether each query has a key, so that SDPA can read the mask as it is.
        checked: shapes and dtypes of validated calls that only need this mask or strip.
    """

    __slots__ = ("checked", "is_open", "mask", "numbers", "rule", "strip", "used")

    def __init__(self, rule: Hashable, numbers: Parameters, used: int) -> None:
        self.rule, self.numbers, self.used = rule, numbers, used
        self.mask: Tensor | None = None
        self.strip: Strip | None = None
        self.is_open = False
        self.checked: set[Hashable] = set()

    @property
    def bytes(self) -> int:
        """Memory of the mask or the strip."""
        return sum(t.nbytes for t in (self.mask, *(self.strip or ())) if t is not None)


class BiasCache:
    """Cache entries for the positions of one grid: usually one mask per layer, requested in a fixed order."""

    __slots__ = ("__weakref__", "clock", "entries", "last")

    def __init__(self) -> None:
        self.entries: list[CacheEntry] = []
        self.clock, self.last = 0, -1
        ALL_CACHES.add(self)

    def __reduce__(self) -> tuple[type[BiasCache], tuple[()]]:
        """Copy and pickle as an empty cache, since copied masks would not count towards `MAX_TOTAL_BYTES`."""
        return BiasCache, ()

    @property
    def bytes(self) -> int:
        """Memory of all masks and strips."""
        return sum(e.bytes for e in self.entries)

    def find(self, rule: Hashable, numbers: Parameters = ()) -> CacheEntry | None:
        """Return the entry with an equal rule and equal parameters, or None."""
        # layers are called in order, so start at the entry after the last hit
        self.clock += 1
        entries = self.entries
        for step in range(1, len(entries) + 1):
            index = (self.last + step) % len(entries)
            entry = entries[index]
            if entry.rule == rule and all(map(torch.equal, entry.numbers, numbers)):
                self.last, entry.used = index, self.clock
                return entry
        return None

    def add(self, rule: Hashable, numbers: Parameters) -> None:
        """Add an entry for new parameters, and drop entries that were not requested recently."""
        # entries that were not requested in two rounds of all layers
        oldest = self.clock - 2 * len(self.entries) - 16
        entries = [e for e in self.entries if e.used >= oldest]
        # parameters that are new in each call would never become old, as the number of entries grows with the clock
        if len(entries) == MAX_ENTRIES:
            entries.remove(min(entries, key=lambda e: e.used))
        self.entries = [*entries, CacheEntry(rule, numbers, self.clock)]
        self.last = len(self.entries) - 1


ALL_CACHES: weakref.WeakSet[BiasCache] = weakref.WeakSet()


def same_positions(bias: Bias, pos: Positions) -> bool:
    """Whether all terms are bound to the positions that hold the cache; others would have to be part of the key."""
    return all(same_positions(t, pos) for t in bias.terms) if isinstance(bias, SumBias) else bias.pos is pos


def fits(masks: BiasCache, size: int) -> bool:
    """Whether a mask of `size` bytes fits into the cache, if necessary after evicting the masks of other grids."""
    if masks.bytes + size > MAX_TOTAL_BYTES:
        return False
    others = [m for m in ALL_CACHES if m is not masks]
    # evict the masks of all other grids at once
    if sum(m.bytes for m in others) + masks.bytes + size > MAX_TOTAL_BYTES:
        for other in others:
            other.entries = []
    return True


def sources_of(bias: Bias) -> tuple[Hashable, Parameters] | None:
    """Return the options and tensors that a bias was created from, or None if these are not known."""
    if bias.key is not None:
        return (type(bias), bias.key), ()
    if isinstance(bias, SumBias):
        sources = [sources_of(term) for term in bias.terms]
        complete = [source for source in sources if source is not None]
        if len(complete) < len(sources):
            return None
        return tuple(rule for rule, _ in complete), tuple(t for _, numbers in complete for t in numbers)
    if type(bias) is TableBias and bias.depends_on is not None:
        options, tensors = bias.depends_on
        return ("table", bias.is_sparse, bias.values.shape, bias.values.dtype, options), tensors
    if type(bias) is TableBias:
        values = [bias.values] if bias.prefix is None else [bias.values, bias.prefix]
        return (len(values), bias.is_sparse), tuple(values)
    if type(bias) is ProfileBias and bias.profile.prefix is None:
        return "profile", (bias.slopes, bias.profile.values)
    if type(bias) is DistanceBias and isinstance(bias.slopes, Tensor):
        return (bias.spacing, *bias.rule), (bias.slopes,)
    if isinstance(bias, FunctionBias) and bias.depends_on is not None:
        options, tensors = bias.depends_on
        return (bias.unit, bias.spacing, bias.rule, options), tensors
    return None
