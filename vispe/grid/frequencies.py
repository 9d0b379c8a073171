"""Frequencies of RoPE and their rules for context extension: PI, NTK-aware, YaRN, LongRoPE and others.

Notation: ``dim`` rotary channels of one axis are ``dim / 2`` pairs i = 0 .. dim / 2 - 1 with frequencies
``base ** (-2 i / dim)`` in radians per step; ``length`` is the training length and ``scale`` the factor of extension.
In images both are per axis, in patches. By default these are computed in float32 in the order of operations of the
public code, so that they agree with released models to the last digits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from vispe.errors import OptionError, ShapeError, counted


def inverse_frequencies(dim: int, base: float = 10000.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return ``base ** (-2 i / dim)``, (dim / 2,): the frequencies of RoPE; increasing the base is called 'ABF'."""
    return 1.0 / _powers(dim, base, dtype)


def _powers(dim: int, base: float, dtype: torch.dtype) -> Tensor:
    """Return ``base ** (2 i / dim)``; divisors of frequencies are applied to these, as in the public code."""
    _positive(base=base)
    if dim < 2 or dim % 2:
        raise OptionError(f"Rotary frequencies need an even number of channels >= 2, got dim={dim}.")
    return base ** (torch.arange(0, dim, 2, dtype=dtype) / dim)


def interpolated(freqs: Tensor, scale: float) -> Tensor:
    """Return ``freqs / scale``: position interpolation (arXiv 2306.15595)."""
    _positive(scale=scale)
    return freqs / scale


def dynamic_scale(length: float, trained: float) -> float:
    """Return ``max(1, length / trained)``, the scale of the 'dynamic' rules."""
    _positive(length=length, trained=trained)
    return max(1.0, length / trained)


def ntk_base(base: float, scale: float, dim: int) -> float:
    """Return the base of the NTK-aware rule, ``base * scale ** (dim / (dim - 2))``."""
    _positive(base=base, scale=scale)
    if dim <= 2:
        raise OptionError(f"NTK-aware scaling needs more than one pair of channels, got dim={dim}.")
    return base * scale ** (dim / (dim - 2))


def wavelength_range(fast: float, slow: float, dim: int, base: float, length: float) -> tuple[int, int]:
    """Return the bounds (low, high) of YaRN's ramp: the pairs with `fast` and `slow` rotations within `length`.

    The pair with r rotations is ``dim * ln(length / (2 pi r)) / (2 ln base)``, rounded outwards and clamped to 0 and
    dim - 1 (not dim / 2 - 1), as in released models.
    """
    _positive(fast=fast, slow=slow, base=base, length=length)
    # pair index with r rotations within `length`, solved from its frequency
    low, high = (dim * math.log(length / (r * 2 * math.pi)) / (2 * math.log(base)) for r in (fast, slow))
    return max(math.floor(low), 0), min(math.ceil(high), dim - 1)


def _ramp(low: float, high: float, pairs: int, dtype: torch.dtype) -> Tensor:
    """Return a ramp (pairs,) that is 0 up to pair `low` and 1 from pair `high` on."""
    # avoid a division by 0, as in the public code
    width = high - low if high != low else 0.001
    return ((torch.arange(pairs, dtype=dtype) - low) / width).clamp(0, 1)


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
    _positive(scale=scale)
    powers = _powers(dim, base, dtype)
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
    powers = _powers(dim, base, dtype)
    # first blend: NTK-aware into interpolated, second blend: original into the first
    ntk_freqs = inverse_frequencies(dim, ntk_base(base, scale, dim), dtype)
    ntk_weight = (1 - _ramp(*wavelength_range(*beta, dim, base, length), dim // 2, dtype)) * ntk
    scaled = 1.0 / (scale * powers) * (1 - ntk_weight) + ntk_freqs * ntk_weight
    unscaled = (1 - _ramp(*wavelength_range(*gamma, dim, base, length), dim // 2, dtype)) * extrapolation
    return scaled * (1 - unscaled) + 1.0 / powers * unscaled


def longrope(
    dim: int, base: float, factors: Tensor | Sequence[float], dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return ``1 / (factor_i * base ** (2 i / dim))``: LongRoPE with searched factors (arXiv 2402.13753)."""
    scaled_factors = torch.as_tensor(factors).to(dtype)
    if scaled_factors.shape != (dim // 2,):
        raise ShapeError(
            f"longrope needs one factor for each of {counted(dim // 2, 'pair')} (dim={dim}), got shape "
            f"{tuple(scaled_factors.shape)}."
        )
    return 1.0 / (scaled_factors * _powers(dim, base, dtype))


def longrope_factors(
    factors: Tensor | Sequence[float], length: float, trained: float, longest: float, *, clamp: bool = True
) -> Tensor:
    """Return LongRoPE's factors interpolated for a length between the trained and the longest one.

    ``1 + (factor - 1) * (length / trained - 1) / (longest / trained - 1)``. `clamp` prevents extrapolation outside of
    these lengths (the reference code extrapolates).

    Raises:
        OptionError: a length is not positive, or `longest` does not exceed `trained`.
    """
    _positive(length=length, trained=trained, longest=longest)
    if longest <= trained:
        raise OptionError(
            f"longrope_factors needs longest > trained, got longest={longest}, trained={trained}."
        )
    # 0 at the trained length, 1 at the longest
    progress = (length / trained - 1) / (longest / trained - 1)
    return 1 + (torch.as_tensor(factors) - 1) * (min(max(progress, 0.0), 1.0) if clamp else progress)


def longrope_mscale(policy: str | float, scale: float, trained: float) -> float:
    """Return LongRoPE's factor of cos and sin.

    Args:
        policy: 'su' for ``sqrt(1 + ln scale / ln trained)``, 'yarn' for `yarn_mscale`, or the factor itself.
        scale: longest over trained length.
        trained: trained length, in tokens.

    Raises:
        OptionError: `policy` is unknown.
    """
    if policy == "yarn":
        return yarn_mscale(scale)
    if policy == "su":
        return 1.0 if scale <= 1 else math.sqrt(1 + math.log(scale) / math.log(trained))
    try:
        return float(policy)
    except ValueError:
        raise OptionError(f"policy must be su, yarn or a number, got {policy!r}.") from None


def giraffe(
    dim: int,
    base: float,
    *,
    scale: float = 1.0,
    power: float = 0.0,
    truncate: float = 0.0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return the frequencies (dim / 2,) of the Giraffe rules (arXiv 2308.10882), applied in this order.

    Args:
        dim: number of rotary channels.
        base: base of the frequencies.
        scale: divisor of all frequencies, if above 1.
        power: exponent; multiplies pair i by ``(1 - i / (dim / 2)) ** power``.
        truncate: period T; with c = 2 pi / T, frequencies from c / 8 to c become c / 16, those below c / 8 become 0.
        dtype: of the computation.
    """
    freqs = interpolated(inverse_frequencies(dim, base, dtype), max(scale, 1.0))
    if power > 0:
        freqs = freqs * (1 - torch.arange(dim // 2, dtype=dtype) / (dim // 2)) ** power
    if truncate > 0:
        # the cutoff is the frequency with period `truncate`
        cutoff = 2 * math.pi / truncate
        low = torch.where(freqs < cutoff / 8, torch.zeros_like(freqs), torch.full_like(freqs, cutoff / 16))
        freqs = torch.where(freqs < cutoff, low, freqs)
    return freqs


def ms_poe_ratios(heads: int, low: float = 1.2, high: float = 1.8, *, reach: bool = False) -> Tensor:
    """Return the divisors of the positions of each head, (heads,): Ms-PoE (arXiv 2403.04797), heads sorted by rank.

    ``low + (high - low) * rank / heads`` as published, which does not reach `high`; with `reach`, divided by heads - 1.

    Raises:
        OptionError: `heads`, `low` or `high` are out of range.
    """
    if heads < 1 or not 0 < low <= high:
        raise OptionError(
            f"Ms-PoE needs heads >= 1 and 0 < low <= high, got heads={heads}, low={low}, high={high}."
        )
    return low + (high - low) * (torch.arange(heads, dtype=torch.float32) / max(heads - reach, 1))


def rotary_tables(freqs: Tensor, positions: Tensor, mscale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return cos and sin (..., n, 2 * pairs) of positions (..., n), repeated for both halves, times `mscale`."""
    angle = positions[..., None].to(freqs.dtype) * freqs
    angle = torch.cat([angle, angle], -1)
    return angle.cos() * mscale, angle.sin() * mscale


def entropy_factor(tokens: float, trained: float) -> float:
    """Return ``ln tokens / ln trained``, the factor of the logits that keeps attention equally sharp with more keys."""
    if min(tokens, trained) <= 1:
        raise OptionError(f"entropy_factor needs more than one key, got tokens={tokens}, trained={trained}.")
    return math.log(tokens) / math.log(trained)


def _positive(**numbers: float) -> None:
    for name, number in numbers.items():
        if not 0 < number < math.inf:
            raise OptionError(f"{name} must be a positive number, got {name}={number}.")
