"""Frequencies of RoPE, simple rules for longer sequences, and rotary tables.

`vispe.grid.yarn` and `vispe.grid.longrope` have further rules of context extension.

Notation: ``dim`` rotary channels of one axis are ``dim / 2`` pairs i = 0 .. dim / 2 - 1 with frequencies
``base ** (-2 i / dim)`` in radians per step; ``length`` is the training length and ``scale`` the factor of extension.
In images both are per axis, in patches. By default these are computed in float32 in the order of operations of the
public code, so that they agree with released models to the last digits.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vispe.errors import OptionError


def inverse_frequencies(dim: int, base: float = 10000.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return ``base ** (-2 i / dim)``, (dim / 2,): the frequencies of RoPE; increasing the base is called 'ABF'."""
    return 1.0 / powers_of_base(dim, base, dtype)


def powers_of_base(dim: int, base: float, dtype: torch.dtype) -> Tensor:
    """Return ``base ** (2 i / dim)``; divisors of frequencies are applied to these, as in the public code."""
    check_positive(base=base)
    if dim < 2 or dim % 2:
        raise OptionError(f"Rotary frequencies need an even number of channels >= 2, got dim={dim}.")
    return base ** (torch.arange(0, dim, 2, dtype=dtype) / dim)


def interpolated(freqs: Tensor, scale: float) -> Tensor:
    """Return ``freqs / scale``: position interpolation (arXiv 2306.15595)."""
    check_positive(scale=scale)
    return freqs / scale


def dynamic_scale(length: float, trained: float) -> float:
    """Return ``max(1, length / trained)``, the scale of the 'dynamic' rules."""
    check_positive(length=length, trained=trained)
    return max(1.0, length / trained)


def ntk_base(base: float, scale: float, dim: int) -> float:
    """Return the base of the NTK-aware rule, ``base * scale ** (dim / (dim - 2))``."""
    check_positive(base=base, scale=scale)
    if dim <= 2:
        raise OptionError(f"NTK-aware scaling needs more than one pair of channels, got dim={dim}.")
    return base * scale ** (dim / (dim - 2))


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


def check_positive(**numbers: float) -> None:
    """Raise `OptionError` unless all numbers are positive and finite."""
    for name, number in numbers.items():
        if not 0 < number < math.inf:
            raise OptionError(f"{name} must be a positive number, got {name}={number}.")
