"""Cache of dense masks of learned biases, invalidated when the parameters change.

In evaluation a learned table gives the same mask in every forward pass. The mask is cached with the positions,
together with a copy of the parameters, and is valid while these are bitwise equal: tensor versions would miss changes
through `.data` or by an optimizer in another process.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.cache.entries import (
    MAX_MASK_BYTES,
    BiasCache,
    CacheEntry,
    Parameters,
    fits,
    same_positions,
    sources_of,
)
from vispe.attention.bias.dense import SumBias
from vispe.attention.bias.lower_to_table import lower_to_table, table_unsupported_reason
from vispe.attention.precision import every_row_open, readable, rounded
from vispe.utils.autocast import no_autocast


def is_cacheable(bias: Bias, dtype: torch.dtype, heads: int) -> bool:
    """Whether the mask of a learned bias can be cached: its parameters are on the CPU, and it is not too large."""
    pos = bias.pos
    if pos is None or pos.memo is None or bias.key is not None or table_unsupported_reason(bias) is not None:
        return False
    return same_positions(bias, pos) and _size(bias, dtype, heads) <= MAX_MASK_BYTES and readable(pos.coords)


def exceeds_cache(bias: Bias, dtype: torch.dtype, heads: int) -> bool:
    """Whether the mask of a fixed or learned bias is larger than a cached mask may be."""
    return _size(bias, dtype, heads) > MAX_MASK_BYTES


def is_cached(bias: Bias, dtype: torch.dtype, heads: int) -> bool:
    """Whether the mask of a learned bias is cached now: no gradient is needed."""
    return _cache_and_key(bias, dtype, heads) is not None


def lookup(bias: Bias, dtype: torch.dtype, heads: int) -> CacheEntry | None:
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
    if entry.mask is None and fits(cache, _size(bias, dtype, heads)):
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


def _cache_and_key(
    bias: Bias, dtype: torch.dtype, heads: int
) -> tuple[BiasCache, tuple[Hashable, Parameters]] | None:
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
        masks = bias.pos.memo[("learned masks", dtype)] = BiasCache()
    return masks, ((rule, *(t.dtype for t in numbers)), numbers)


def _size(bias: Bias, dtype: torch.dtype, heads: int) -> int:
    """Return the size of a mask in bytes."""
    tokens = 0 if bias.pos is None else bias.pos.tokens
    return (heads if bias.per_head else 1) * tokens**2 * dtype.itemsize


def _parameters(bias: Bias) -> tuple[Hashable, Parameters]:
    """Return the hashable options and the parameter tensors that determine a bias with a table."""
    sources = sources_of(bias)
    if sources is not None:
        return sources
    if isinstance(bias, SumBias):
        rules, numbers = zip(*map(_parameters, bias.terms), strict=True)
        return rules, tuple(t for group in numbers for t in group)
    table, prefix_values = lower_to_table(bias)
    return type(bias), (table,) if prefix_values is None else (table, prefix_values)
