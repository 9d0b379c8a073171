"""Cache of packed strips of learned biases, for the fused kernels.

Comparing values on a GPU would wait for it. The strips are therefore valid while the parameters have the same memory,
shape, strides and version, and until the next backward pass of fused attention, since a training step may change
parameters through `.data`. Values written through `.data` without any training step are not detected, nor are those
that a replayed CUDA graph writes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.cache.entries import (
    MAX_MASK_BYTES,
    BiasCache,
    CacheEntry,
    Parameters,
    Strip,
    fits,
    same_positions,
    sources_of,
)
from vispe.attention.precision import is_eager

_training_steps = 0  # backward passes of fused attention


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
            strip = make()
        size = sum(t.nbytes for t in strip if t is not None)
        if size > MAX_MASK_BYTES or not fits(cache, size):
            return strip
        entry.strip = strip
    return entry.strip


def find_strip(bias: Bias, options: Hashable) -> CacheEntry | None:
    """Return the cache entry of a learned bias with a strip, or None."""
    sources = _strips_and_rule(bias, options)
    entry = None if sources is None else sources[0].find(sources[1])
    return None if entry is None or entry.strip is None else entry


def training_step() -> None:
    """Invalidate all strips of learned biases, since their parameters will be changed."""
    global _training_steps
    _training_steps += 1


def _strips_and_rule(bias: Bias, options: Hashable) -> tuple[BiasCache, Hashable, Parameters] | None:
    """Return the cache, the key of a bias's strip and its parameters; None if the strip cannot be cached."""
    pos = bias.pos
    if pos is None or pos.memo is None or not pos.static or not same_positions(bias, pos):
        return None
    sources = sources_of(bias)
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
        cache = pos.memo["learned strips"] = BiasCache()
    return cache, (rule, options, _training_steps, *versions), numbers
