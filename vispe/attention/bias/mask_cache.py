"""Cache of dense masks and packed strips of learned biases, invalidated when the parameters change.

In evaluation a learned table gives the same mask in every forward pass. The mask is cached with the positions,
together with a copy of the parameters, and is valid while these are bitwise equal: tensor versions would miss changes
through `.data` or by an optimizer in another process.

Comparing values on a GPU would wait for it. The strips of the fused kernels are therefore valid while the parameters
have the same memory, shape, strides and version, and until the next backward pass of fused attention, since a training
step may change parameters through `.data`. Values written through `.data` without any training step are not detected,
nor are those that a replayed CUDA graph writes.

Masks and strips are cached from the second call on, so a single forward pass costs no memory. Those above
`MAX_MASK_BYTES` are never cached, and all together have at most `MAX_TOTAL_BYTES`. Masks and strips of fixed biases are
cached with the positions by `Bias.key`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.dense import SumBias
from vispe.attention.bias.distance_bias import DistanceBias
from vispe.attention.bias.lower_to_table import lower_to_table, table_unsupported_reason
from vispe.attention.bias.offset import OffsetBias
from vispe.attention.bias.radial import RadialBias
from vispe.attention.bias.table import ProfileBias, TableBias
from vispe.attention.precision import every_row_open, is_eager, readable, rounded
from vispe.grid import Positions
from vispe.utils.autocast import no_autocast

MAX_MASK_BYTES = 64 << 20  # bytes of one mask
MAX_TOTAL_BYTES = 1 << 30  # bytes of all masks, whatever models and grids they belong to
MAX_ENTRIES = 128  # biases on one grid; more than any model has layers
_Parameters = tuple[Tensor, ...]
Strip = tuple[
    Tensor, Tensor, Tensor | None, Tensor | None
]  # runs, prefix biases, float16 copy, visible offsets
_training_steps = 0  # backward passes of fused attention


class CachedMask:
    """Cache entry of one learned bias on one grid.

    Attributes:
        mask: (1, h or 1, n, n) in the dtype of attention, from `precision.rounded`; None after the first call, or if
            the cache is full.
        strip: for entries of the fused kernels, instead of a mask; None after the first call, or if the cache is full.
        is_open: whether each query has a key, so that SDPA can read the mask as it is.
        checked: shapes and dtypes of validated calls that only need this mask or strip.
    """

    __slots__ = ("checked", "is_open", "mask", "numbers", "rule", "strip", "used")

    def __init__(self, rule: Hashable, numbers: _Parameters, used: int) -> None:
        self.rule, self.numbers, self.used = rule, numbers, used
        self.mask: Tensor | None = None
        self.strip: Strip | None = None
        self.is_open = False
        self.checked: set[Hashable] = set()

    @property
    def bytes(self) -> int:
        """Memory of the mask or the strip."""
        return sum(t.nbytes for t in (self.mask, *(self.strip or ())) if t is not None)


class _MaskCache:
    """Cache entries for the positions of one grid: usually one mask per layer, requested in a fixed order."""

    __slots__ = ("__weakref__", "clock", "entries", "last")

    def __init__(self) -> None:
        self.entries: list[CachedMask] = []
        self.clock, self.last = 0, -1
        _ALL_CACHES.add(self)

    def __reduce__(self) -> tuple[type[_MaskCache], tuple[()]]:
        """Copy and pickle as an empty cache, since copied masks would not count towards `MAX_TOTAL_BYTES`."""
        return _MaskCache, ()

    @property
    def bytes(self) -> int:
        return sum(e.bytes for e in self.entries)

    def find(self, rule: Hashable, numbers: _Parameters = ()) -> CachedMask | None:
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

    def add(self, rule: Hashable, numbers: _Parameters) -> None:
        """Add an entry for new parameters, and drop entries that were not requested recently."""
        # entries that were not requested in two rounds of all layers
        oldest = self.clock - 2 * len(self.entries) - 16
        entries = [e for e in self.entries if e.used >= oldest]
        # parameters that are new in each call would never become old, as the number of entries grows with the clock
        if len(entries) == MAX_ENTRIES:
            entries.remove(min(entries, key=lambda e: e.used))
        self.entries = [*entries, CachedMask(rule, numbers, self.clock)]
        self.last = len(self.entries) - 1


_ALL_CACHES: weakref.WeakSet[_MaskCache] = weakref.WeakSet()


def is_cacheable(bias: Bias, dtype: torch.dtype, heads: int) -> bool:
    """Whether the mask of a learned bias can be cached: its parameters are on the CPU, and it is not too large."""
    pos = bias.pos
    if pos is None or pos.memo is None or bias.key is not None or table_unsupported_reason(bias) is not None:
        return False
    return _same_positions(bias, pos) and _size(bias, dtype, heads) <= MAX_MASK_BYTES and readable(pos.coords)


def exceeds_cache(bias: Bias, dtype: torch.dtype, heads: int) -> bool:
    """Whether the mask of a fixed or learned bias is larger than a cached mask may be."""
    return _size(bias, dtype, heads) > MAX_MASK_BYTES


def is_cached(bias: Bias, dtype: torch.dtype, heads: int) -> bool:
    """Whether the mask of a learned bias is cached now: no gradient is needed."""
    return _cache_and_key(bias, dtype, heads) is not None


def lookup(bias: Bias, dtype: torch.dtype, heads: int) -> CachedMask | None:
    """Return the cache entry of a learned bias, or None."""
    entry_key = _cache_and_key(bias, dtype, heads)
    return None if entry_key is None else entry_key[0].find(*entry_key[1])


def mask(bias: Bias, dtype: torch.dtype, heads: int) -> Tensor | None:
    """Return the cached mask of a learned bias (1, h or 1, n, n), computed on the second call; else None.

    Args:
        bias: the bias.
        dtype: of attention.
        heads: h.
    """
    entry_key = _cache_and_key(bias, dtype, heads)
    if entry_key is None:
        return None
    cache, key = entry_key
    entry = cache.find(*key)
    if entry is None:
        with torch.inference_mode(False):
            cache.add(key[0], tuple(t.detach().clone() for t in key[1]))
        return None
    if entry.mask is None and _fits(cache, _size(bias, dtype, heads)):
        # a mask cached in inference mode must also be usable in training
        with torch.inference_mode(False), torch.no_grad(), no_autocast(key[1][0].device):
            entry.mask = rounded(bias.dense(), dtype)
            entry.is_open = every_row_open(entry.mask)
    return entry.mask


def is_open(bias: Bias, dtype: torch.dtype, heads: int = 1) -> bool:
    """Whether the mask of a bias is cached, and each query has a key in it."""
    pos, key = bias.pos, bias.key
    if key is None:
        entry = lookup(bias, dtype, heads)
        return entry is not None and entry.is_open
    if pos is None or pos.memo is None or not pos.static or not readable(pos.coords):
        return False
    return pos.remember(("open", key, dtype), lambda: every_row_open(bias.mask(dtype)))


def cached_strip(bias: Bias, options: Hashable, make: Callable[[], Strip]) -> Strip:
    """Return the packed strip of a learned bias, cached from the second call on if it needs no gradient.

    Args:
        bias: the bias.
        options: what the strip depends on in addition to the bias and its positions.
        make: computes it.
    """
    sources = _strips_and_rule(bias, options)
    if sources is None:
        return make()
    cache, rule, numbers = sources
    entry = cache.find(rule)
    if entry is None:
        # the parameters themselves, so that their memory is not used for other tensors
        cache.add(rule, numbers)
        return make()
    if entry.strip is None:
        # a strip cached in inference mode must also be usable in training
        with torch.inference_mode(False), torch.no_grad():
            made = make()
        size = sum(t.nbytes for t in made if t is not None)
        if size > MAX_MASK_BYTES or not _fits(cache, size):
            return made
        entry.strip = made
    return entry.strip


def find_strip(bias: Bias, options: Hashable) -> CachedMask | None:
    """Return the cache entry of a learned bias with a strip, or None."""
    sources = _strips_and_rule(bias, options)
    entry = None if sources is None else sources[0].find(sources[1])
    return None if entry is None or entry.strip is None else entry


def training_step() -> None:
    """Invalidate all strips of learned biases, since their parameters will be changed."""
    global _training_steps
    _training_steps += 1


def _cache_and_key(
    bias: Bias, dtype: torch.dtype, heads: int
) -> tuple[_MaskCache, tuple[Hashable, _Parameters]] | None:
    """Return the cache and key of a bias's mask; None for a bias that needs a gradient or is not a table."""
    if not is_cacheable(bias, dtype, heads) or bias.pos is None or bias.pos.memo is None:
        return None
    with no_autocast(bias.pos.coords.device):
        rule, numbers = _parameters(bias)
    # comparing values must not wait for a device, and a gradient needs the graph
    if any(not readable(t) or (t.requires_grad and torch.is_grad_enabled()) for t in numbers):
        return None
    masks = bias.pos.memo.get(("learned masks", dtype))
    if masks is None:
        masks = bias.pos.memo[("learned masks", dtype)] = _MaskCache()
    return masks, ((rule, *(t.dtype for t in numbers)), numbers)


def _strips_and_rule(bias: Bias, options: Hashable) -> tuple[_MaskCache, Hashable, _Parameters] | None:
    """Return the cache, the key of a bias's strip and its parameters; None if the strip cannot be cached."""
    pos = bias.pos
    if pos is None or pos.memo is None or not pos.static or not _same_positions(bias, pos):
        return None
    sources = _sources(bias)
    if sources is None:
        return None
    rule, numbers = sources
    # inference tensors have no version
    if any(
        not is_eager(t) or t.is_inference() or (t.requires_grad and torch.is_grad_enabled()) for t in numbers
    ):
        return None
    # a captured graph has to compute the strip again in each replay
    if any(t.is_cuda for t in numbers) and torch.cuda.is_current_stream_capturing():
        return None
    versions = [(t.data_ptr(), t._version, t.shape, t.stride(), t.dtype) for t in numbers]
    cache = pos.memo.get("learned strips")
    if cache is None:
        cache = pos.memo["learned strips"] = _MaskCache()
    return cache, (rule, options, _training_steps, *versions), numbers


def _same_positions(bias: Bias, pos: Positions) -> bool:
    """Whether all terms are bound to the positions that hold the cache; others would have to be part of the key."""
    return all(_same_positions(t, pos) for t in bias.terms) if isinstance(bias, SumBias) else bias.pos is pos


def _size(bias: Bias, dtype: torch.dtype, heads: int) -> int:
    """Return the size of a mask in bytes."""
    tokens = 0 if bias.pos is None else bias.pos.tokens
    return (heads if bias.per_head else 1) * tokens**2 * dtype.itemsize


def _fits(masks: _MaskCache, size: int) -> bool:
    """Whether a mask of `size` bytes fits into the cache, if necessary after evicting the masks of other grids."""
    if masks.bytes + size > MAX_TOTAL_BYTES:
        return False
    others = [m for m in _ALL_CACHES if m is not masks]
    # evict the masks of all other grids at once
    if sum(m.bytes for m in others) + masks.bytes + size > MAX_TOTAL_BYTES:
        for other in others:
            other.entries = []
    return True


def _parameters(bias: Bias) -> tuple[Hashable, _Parameters]:
    """Return the hashable options and the parameter tensors that determine a bias with a table."""
    sources = _sources(bias)
    if sources is not None:
        return sources
    if isinstance(bias, SumBias):
        rules, numbers = zip(*map(_parameters, bias.terms), strict=True)
        return rules, tuple(t for group in numbers for t in group)
    table, prefix_values = lower_to_table(bias)
    return type(bias), (table,) if prefix_values is None else (table, prefix_values)


def _sources(bias: Bias) -> tuple[Hashable, _Parameters] | None:
    """Return the options and tensors that a bias was created from, or None if these are not known."""
    if bias.key is not None:
        return (type(bias), bias.key), ()
    if isinstance(bias, SumBias):
        sources = [_sources(term) for term in bias.terms]
        known = [source for source in sources if source is not None]
        if len(known) < len(sources):
            return None
        return tuple(rule for rule, _ in known), tuple(t for _, numbers in known for t in numbers)
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
    if isinstance(bias, OffsetBias | RadialBias) and bias.depends_on is not None:
        options, tensors = bias.depends_on
        return (bias.spacing, bias.wrap if isinstance(bias, OffsetBias) else bias.rule, options), tensors
    return None
