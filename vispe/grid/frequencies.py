"""Frequency schedules of rotary encodings: what to do with the angles when the grid or the text gets longer.

Notation: ``dim`` rotary channels of one axis make ``dim / 2`` pairs i = 0 .. dim / 2 - 1 with frequencies
``base ** (-2 i / dim)`` in radians per step; ``length`` is what the model was trained with and ``scale`` how many
times longer it gets. In images both are counted along one axis, in patches. By default the rules of the literature
are computed in float32 in the order of the public code, so that they agree with released models to the last digits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from vispe.errors import OptionError, ShapeError

Schedule = Literal["none", "rescale", "pi", "ntk", "yarn"]
BETAS = (1.0, 0.25)  # turns in the training length: YaRN's 32 and 1 do not exist on grids of 14 to 37 patches


def inverse_frequencies(dim: int, base: float = 10000.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return ``base ** (-2 i / dim)``, (dim / 2,): the frequencies of RoPE; a larger base is the rule 'ABF'."""
    return 1.0 / _powers(dim, base, dtype)


def _powers(dim: int, base: float, dtype: torch.dtype) -> Tensor:
    """Return ``base ** (2 i / dim)``; what divides frequencies multiplies these first, as in the public code."""
    _positive(base=base)
    if dim < 2 or dim % 2:
        raise OptionError(f"Rotary frequencies need an even number of channels, got dim={dim}.")
    return base ** (torch.arange(0, dim, 2, dtype=dtype) / dim)


def interpolated(freqs: Tensor, scale: float) -> Tensor:
    """Return ``freqs / scale``: position interpolation (arXiv 2306.15595)."""
    _positive(scale=scale)
    return freqs / scale


def dynamic_scale(length: float, trained: float) -> float:
    """Return ``length / trained``, never below 1: the scale of the 'dynamic' rules."""
    _positive(length=length, trained=trained)
    return max(1.0, length / trained)


def ntk_base(base: float, scale: float, dim: int) -> float:
    """Return the base of the NTK-aware rule, ``base * scale ** (dim / (dim - 2))``."""
    _positive(base=base, scale=scale)
    if dim <= 2:
        raise OptionError(f"The NTK-aware rule needs more than one pair of channels, got dim={dim}.")
    return base * scale ** (dim / (dim - 2))


def turn_range(fast: float, slow: float, dim: int, base: float, length: float) -> tuple[int, int]:
    """Return the pairs (low, high) between which a ramp runs, those making `fast` and `slow` turns in `length`.

    The pair that makes r turns is ``dim * ln(length / (2 pi r)) / (2 ln base)``; rounded outwards and clamped to
    0 and dim - 1 (not dim / 2 - 1), as released models have it.
    """
    _positive(fast=fast, slow=slow, base=base, length=length)
    low, high = (dim * math.log(length / (r * 2 * math.pi)) / (2 * math.log(base)) for r in (fast, slow))
    return max(math.floor(low), 0), min(math.ceil(high), dim - 1)


def _ramp(low: float, high: float, pairs: int, dtype: torch.dtype) -> Tensor:
    """Return a ramp (pairs,) that is 0 up to pair `low` and 1 from pair `high` on."""
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
    """Return YaRN's frequencies (dim / 2,): pairs of many turns stay, those of few are interpolated.

    Args:
        dim: channels.
        base: base of the frequencies.
        scale: how many times longer than `length`.
        length: training length.
        beta_fast: turns in `length` from which a pair stays as it is.
        beta_slow: turns up to which it is interpolated fully.
        extrapolation: weight of the unscaled frequencies.
        dtype: of the computation.

    Source: arXiv 2309.00071. `turn_range` gives the bounds of the ramp, `yarn_mscale` the factor of cos and sin.
    """
    _positive(scale=scale)
    powers = _powers(dim, base, dtype)
    keep = (1 - _ramp(*turn_range(beta_fast, beta_slow, dim, base, length), dim // 2, dtype)) * extrapolation
    return 1.0 / (scale * powers) * (1 - keep) + 1.0 / powers * keep


def yarn_mscale(scale: float, attn_factor: float = 1.0) -> float:
    """Return YaRN's factor of cos and sin, ``0.1 ln(scale) + 1`` (1 up to scale 1); logits get its square."""
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
    """Return the frequencies (dim / 2,) of NTK-by-parts: from unscaled over NTK-aware to interpolated pairs.

    Args:
        dim: channels.
        base: base of the frequencies.
        scale: how many times longer than `length`.
        length: training length.
        beta: turns in `length` between which NTK-aware goes over into interpolated.
        gamma: turns between which unscaled goes over into these.
        ntk: weight of the NTK-aware frequencies.
        extrapolation: weight of the unscaled frequencies.
        dtype: of the computation.
    """
    powers = _powers(dim, base, dtype)
    stretched = inverse_frequencies(dim, ntk_base(base, scale, dim), dtype)
    part = (1 - _ramp(*turn_range(*beta, dim, base, length), dim // 2, dtype)) * ntk
    mixed = 1.0 / (scale * powers) * (1 - part) + stretched * part
    keep = (1 - _ramp(*turn_range(*gamma, dim, base, length), dim // 2, dtype)) * extrapolation
    return mixed * (1 - keep) + 1.0 / powers * keep


def longrope(
    dim: int, base: float, factors: Tensor | Sequence[float], dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return ``1 / (factor_i * base ** (2 i / dim))``: LongRoPE with searched factors (arXiv 2402.13753)."""
    given = torch.as_tensor(factors).to(dtype)
    if given.shape != (dim // 2,):
        raise ShapeError(
            f"longrope needs one factor for each of {dim // 2} pairs (dim={dim}), got {tuple(given.shape)}."
        )
    return 1.0 / (given * _powers(dim, base, dtype))


def longrope_factors(
    factors: Tensor | Sequence[float], length: float, trained: float, longest: float, *, clamp: bool = True
) -> Tensor:
    """Return LongRoPE's factors for a length on the way from the trained to the longest one.

    ``1 + (factor - 1) * (length / trained - 1) / (longest / trained - 1)``. Below the trained length they would go
    on below 1 and, beyond, above what was searched; `clamp` stops both (the reference does not).
    """
    _positive(length=length, trained=trained, longest=longest)
    if longest <= trained:
        raise OptionError(
            f"longrope_factors needs longest above trained, got longest={longest}, trained={trained}."
        )
    way = (length / trained - 1) / (longest / trained - 1)
    return 1 + (torch.as_tensor(factors) - 1) * (min(max(way, 0.0), 1.0) if clamp else way)


def longrope_mscale(policy: str | float, scale: float, trained: float) -> float:
    """Return LongRoPE's factor of cos and sin.

    Args:
        policy: 'su' for ``sqrt(1 + ln scale / ln trained)``, 'yarn' for `yarn_mscale`, or the number itself.
        scale: longest over trained length.
        trained: trained length, in tokens.
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
        dim: channels.
        base: base of the frequencies.
        scale: divides all of them when above 1.
        power: multiplies pair i by ``(1 - i / (dim / 2)) ** power``.
        truncate: period T; with c = 2 pi / T those of c / 8 to c become c / 16 and those below c / 8 zero.
        dtype: of the computation.
    """
    freqs = interpolated(inverse_frequencies(dim, base, dtype), max(scale, 1.0))
    if power > 0:
        freqs = freqs * (1 - torch.arange(dim // 2, dtype=dtype) / (dim // 2)) ** power
    if truncate > 0:
        cutoff = 2 * math.pi / truncate
        low = torch.where(freqs < cutoff / 8, torch.zeros_like(freqs), torch.full_like(freqs, cutoff / 16))
        freqs = torch.where(freqs < cutoff, low, freqs)
    return freqs


def ms_poe_ratios(heads: int, low: float = 1.2, high: float = 1.8, *, reach: bool = False) -> Tensor:
    """Return what divides the positions of each head, (heads,): Ms-PoE, for heads in order of their rank.

    ``low + (high - low) * rank / heads`` as published, which stays below `high`; `reach` divides by heads - 1.
    """
    if heads < 1 or not 0 < low <= high:
        raise OptionError(
            f"Ms-PoE needs heads and 0 < low <= high, got heads={heads}, low={low}, high={high}."
        )
    return low + (high - low) * (torch.arange(heads, dtype=torch.float32) / max(heads - reach, 1))


def p_rope(freqs: Tensor, share: float) -> Tensor:
    """Return the frequencies with all but the highest `share`, rounded down, set to 0: p-RoPE (arXiv 2410.06205)."""
    if not 0 <= share <= 1:
        raise OptionError(f"p_rope keeps a share between 0 and 1 of the frequencies, got share={share}.")
    kept = int(share * freqs.shape[-1])
    order = freqs.argsort(-1, descending=True).argsort(-1)
    return torch.where(order < kept, freqs, torch.zeros_like(freqs))


def rotary_tables(freqs: Tensor, positions: Tensor, mscale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return cos and sin (..., n, 2 * pairs) of positions (..., n), halves joined, times `mscale`."""
    angle = positions[..., None].to(freqs.dtype) * freqs
    angle = torch.cat([angle, angle], -1)
    return angle.cos() * mscale, angle.sin() * mscale


def entropy_factor(tokens: float, trained: float) -> float:
    """Return ``ln tokens / ln trained``: the factor of the logits that keeps attention as sharp over more keys."""
    if min(tokens, trained) <= 1:
        raise OptionError(f"entropy_factor needs more than one key, got tokens={tokens}, trained={trained}.")
    return math.log(tokens) / math.log(trained)


def likeness(freqs: Tensor, side: int) -> Tensor:
    """Return ``sum_i cos(m * freqs_i)`` for m = 0 .. side: how much more than chance like tokens m apart look alike."""
    steps = torch.arange(side + 1, dtype=freqs.dtype, device=freqs.device)
    return (steps[:, None] * freqs).cos().sum(-1)


def min_base(pairs: int, side: int) -> float:
    """Return the smallest base with which no distance up to `side` looks less alike than chance.

    `likeness` of ``base ** (-i / pairs)`` stays 0 or more for m = 0 .. side; searched on a grid of 1 %. With two axes
    it is enough that each of them has such a base.
    """
    if pairs < 1 or side < 1:
        raise OptionError(f"min_base needs pairs and side of 1 or more, got pairs={pairs}, side={side}.")
    share = torch.arange(pairs, dtype=torch.float64) / pairs
    for k in range(1, 3000):
        base = 1.01**k
        if (likeness(base**-share, side) >= 0).all():
            return base
    raise OptionError(
        f"No base below {1.01**3000:.1e} serves side={side} with pairs={pairs}; use more pairs."
    )


def grid_frequencies(
    freqs: Tensor, schedule: Schedule, scale: Tensor, length: Tensor, *, cell: Tensor | float = 1.0
) -> Tensor:
    """Return the frequencies of one axis of a token grid for another number of patches.

    Args:
        freqs: (..., pairs), radians per unit of the coordinates, fast to slow along the pairs for 'ntk'.
        schedule: 'none' keeps them; 'rescale' divides by the scale, so that every grid spans what the
            training grid spanned; 'pi' does so for larger grids only; 'ntk' divides pair i by
            ``scale ** (i / (pairs - 1))``; 'yarn' keeps pairs of 1 turn or more in `length` and those shorter than 4
            patches, interpolates those of a quarter turn or less, and runs between in the logarithm of the turns. These
            two leave smaller grids alone.
        scale: patches over training patches, broadcasting to the frequencies without their last axis.
        length: length of the training grid, in units of the coordinates, likewise.
        cell: distance between neighbouring patches, likewise.

    Returns:
        (..., pairs), differentiable.
    """
    check_schedule(schedule)
    if schedule == "none":
        return freqs
    scale = scale[..., None].to(freqs)
    if schedule == "rescale":
        return freqs / scale
    scale = scale.clamp(min=1)
    pairs = freqs.shape[-1]
    if schedule == "pi":
        return freqs / scale
    if schedule == "ntk":
        share = torch.arange(pairs, dtype=freqs.dtype, device=freqs.device) / max(pairs - 1, 1)
        return freqs / scale**share
    size = freqs.detach().abs()
    turns = size * length[..., None].to(freqs) / (2 * math.pi)
    fast, slow = (math.log(b) for b in BETAS)
    blend = ((fast - turns.clamp(min=1e-30).log()) / (fast - slow)).clamp(0, 1)
    step = cell[..., None].to(freqs) if isinstance(cell, Tensor) else cell
    blend = blend.masked_fill(size * step > 2 * math.pi / 4, 0.0)
    return freqs * (1 - blend) + freqs / scale * blend


def check_schedule(schedule: str) -> None:
    """Raise `OptionError` unless `schedule` is one that `grid_frequencies` knows."""
    if schedule not in get_args(Schedule):
        raise OptionError(f"schedule must be one of {', '.join(get_args(Schedule))}, got {schedule!r}.")


def _positive(**numbers: float) -> None:
    for name, number in numbers.items():
        if not 0 < number < math.inf:
            raise OptionError(f"{name} must be a positive number, got {name}={number}.")
