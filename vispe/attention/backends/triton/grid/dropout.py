"""Dropout of attention weights with a counter-based random generator; no mask is stored.

The random bits of a pair depend on a seed, the sample and head, the query and the key, so that forward and backward
kernels drop the same weights for any tile sizes. Seeds are mixed with a strong hash, once per program; one round per
row and column of a tile and two per pair are then sufficient. `rng` is the state shared by the pairs of a head, an
empty tuple without dropout.
"""

import triton
import triton.language as tl


@triton.jit
def mix_hash(x):
    """Return 32 bits that each depend on all input bits (the finalizer of MurmurHash3)."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def random_bits(SEED, head, drop, DROP: tl.constexpr):
    """Return (seed of queries, seed of keys, threshold of dropped bits, 1 / (1 - p)) of a head, or ()."""
    if DROP:
        seed = tl.load(SEED)
        # fold the 64-bit seed and the head index into 32 bits
        seed = mix_hash(mix_hash((seed >> 32).to(tl.uint32)) ^ seed.to(tl.uint32))
        seed = mix_hash(seed ^ head.to(tl.uint32))
        # the threshold is p * 2^32: bits below it are dropped
        return seed, mix_hash(seed + 1), tl.cast(drop * 4294967296.0, tl.uint32), 1.0 / (1.0 - drop)
    else:
        return ()


@triton.jit
def mix_round(x):
    """Return 32 bits after one mixing round."""
    # the constants are those of MurmurHash3
    x *= 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def not_dropped(rng, i, j):
    """Return the mask of weights that are not dropped for queries `i` and keys `j`, which broadcast."""
    # one round per row and per column, two per pair
    pair = mix_round(rng[0] ^ i.to(tl.uint32)) ^ mix_round(rng[1] ^ j.to(tl.uint32))
    pair *= 0x9E3779B1
    pair = (pair ^ (pair >> 15)) * 0x85EBCA6B
    return pair >= rng[2]
