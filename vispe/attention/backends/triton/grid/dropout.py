"""Dropout of attention weights: which of them survive is computed from their places, and nothing of it is kept.

The number of a pair comes from a seed, the sample and head, the query and the key, so that forward and backward kernels
find the same survivors, whatever their tiles are. Seeds are stirred well, which few programs notice; a round for each
row and column of a tile and two for each pair are then enough. `luck` is what the pairs of a head share: nothing where
nothing is dropped.
"""

import triton
import triton.language as tl


@triton.jit
def stirred(x):
    """Return 32 bits of which each depends on all those given (the finisher of MurmurHash3)."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def luck_of(SEED, head, drop, DROP: tl.constexpr):
    """Return seeds of the queries and keys of a head, the bound of what is dropped, and what survivors are times."""
    if DROP:
        seed = tl.load(SEED)
        seed = stirred(stirred((seed >> 32).to(tl.uint32)) ^ seed.to(tl.uint32))
        seed = stirred(seed ^ head.to(tl.uint32))
        return seed, stirred(seed + 1), tl.cast(drop * 4294967296.0, tl.uint32), 1.0 / (1.0 - drop)
    else:
        return ()


@triton.jit
def shaken(x):
    """Return 32 bits of one round."""
    x *= 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def survive(luck, i, j):
    """Return which weights of queries `i` and keys `j` survive; one of the two is a row, the other a column."""
    pair = shaken(luck[0] ^ i.to(tl.uint32)) ^ shaken(luck[1] ^ j.to(tl.uint32))
    pair *= 0x9E3779B1
    pair = (pair ^ (pair >> 15)) * 0x85EBCA6B
    return pair >= luck[2]
