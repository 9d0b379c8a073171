"""Frequencies of YaRN and NTK-by-parts: ramps over the pairs between unscaled and interpolated frequencies.

The notation is that of `vispe.grid.frequencies`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vispe.grid.frequencies import check_positive, inverse_frequencies, ntk_base, powers_of_base


def yarn(
    dim: int,
    base: float,
    scale: float,
    length: float,
    *,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    extrapolation: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return YaRN's frequencies (dim / 2,): high frequencies are unchanged, low frequencies are interpolated.

    Args:
        dim: number of rotary channels.
        base: base of the frequencies.
        scale: factor of extension.
        length: training length.
        beta_fast: rotations within `length` from which a pair is unchanged.
        beta_slow: rotations up to which a pair is fully interpolated.
        extrapolation: weight of the unscaled frequencies.
        dtype: of the computation.

    Raises:
        OptionError: an argument is out of range.

    Source: arXiv 2309.00071. `wavelength_range` gives the bounds of the ramp, `yarn_mscale` the factor of cos and sin.
    """
    check_positive(scale=scale)
    powers = powers_of_base(dim, base, dtype)
    unscaled = (
        1 - _ramp(*wavelength_range(beta_fast, beta_slow, dim, base, length), dim // 2, dtype)
    ) * extrapolation
    # blend of interpolated and original frequencies
    return 1.0 / (scale * powers) * (1 - unscaled) + 1.0 / powers * unscaled


def yarn_mscale(scale: float, attn_factor: float = 1.0) -> float:
    """Return YaRN's factor of cos and sin, ``0.1 ln(scale) + 1`` (1 for scale <= 1); logits scale by its square."""
    return (1.0 if scale <= 1 else 0.1 * math.log(scale) + 1.0) * attn_factor


def ntk_by_parts(
    dim: int,
    base: float,
    scale: float,
    length: float,
    *,
    beta: tuple[float, float] = (1.25, 0.75),
    gamma: tuple[float, float] = (16.0, 2.0),
    ntk: float = 1.0,
    extrapolation: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return NTK-by-parts frequencies (dim / 2,): unscaled, then NTK-aware, then interpolated pairs.

    Args:
        dim: number of rotary channels.
        base: base of the frequencies.
        scale: factor of extension.
        length: training length.
        beta: rotations within `length` between which NTK-aware blends into interpolated.
        gamma: rotations between which unscaled blends into these.
        ntk: weight of the NTK-aware frequencies.
        extrapolation: weight of the unscaled frequencies.
        dtype: of the computation.
    """
    powers = powers_of_base(dim, base, dtype)
    # first blend: NTK-aware into interpolated, second blend: original into the first
    ntk_freqs = inverse_frequencies(dim, ntk_base(base, scale, dim), dtype)
    ntk_weight = (1 - _ramp(*wavelength_range(*beta, dim, base, length), dim // 2, dtype)) * ntk
    scaled = 1.0 / (scale * powers) * (1 - ntk_weight) + ntk_freqs * ntk_weight
    unscaled = (1 - _ramp(*wavelength_range(*gamma, dim, base, length), dim // 2, dtype)) * extrapolation
    return scaled * (1 - unscaled) + 1.0 / powers * unscaled


def wavelength_range(fast: float, slow: float, dim: int, base: float, length: float) -> tuple[int, int]:
    """Return the bounds (low, high) of YaRN's ramp: the pairs with `fast` and `slow` rotations within `length`.

    The pair with r rotations is ``dim * ln(length / (2 pi r)) / (2 ln base)``, rounded outwards and clamped to 0 and
    dim - 1 (not dim / 2 - 1), as in released models.
    """
    check_positive(fast=fast, slow=slow, base=base, length=length)
    # pair index with r rotations within `length`, solved from its frequency
    low, high = (dim * math.log(length / (r * 2 * math.pi)) / (2 * math.log(base)) for r in (fast, slow))
    return max(math.floor(low), 0), min(math.ceil(high), dim - 1)


def _ramp(low: float, high: float, pairs: int, dtype: torch.dtype) -> Tensor:
    """Return a ramp (pairs,) that is 0 up to pair `low` and 1 from pair `high` on."""
    # avoid a division by 0, as in the public code
    width = high - low if high != low else 0.001
    return ((torch.arange(pairs, dtype=dtype) - low) / width).clamp(0, 1)
