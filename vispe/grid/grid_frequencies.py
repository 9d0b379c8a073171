"""Rotary frequencies on token grids: schedules for other numbers of patches, p-RoPE, and the smallest base."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from vispe.errors import OptionError

Schedule = Literal["none", "rescale", "align_corners", "pi", "ntk", "yarn"]
# rotations within the training length; YaRN's 32 and 1 do not occur on grids of 14 to 37 patches
BETAS = (1.0, 0.25)


def grid_frequencies(
    freqs: Tensor, schedule: Schedule, scale: Tensor, length: Tensor, *, cell: Tensor | float = 1.0
) -> Tensor:
    """Return the frequencies of one axis of a token grid for another number of patches.

    Args:
        freqs: (..., pairs), radians per unit of the coordinates, in descending order for 'ntk'.
        schedule: 'none' returns them unchanged; 'rescale' divides by the scale, so that every grid has the angle range
            of the training grid; 'align_corners' multiplies by (trained - 1) / (patches - 1), so that the first and
            last patches of all grids coincide, and by 0 for a single patch; 'pi' rescales only larger grids; 'ntk'
            divides pair i by ``scale ** (i / (pairs - 1))``; 'yarn' keeps pairs with at least 1 rotation within
            `length` and wavelengths below 4 patches, interpolates pairs with at most a quarter rotation, and blends
            between these linearly in the logarithm of the rotations. 'ntk' and 'yarn' do not change smaller grids.
        scale: patches over training patches, broadcasting to the frequencies without their last axis.
        length: length of the training grid, in units of the coordinates, likewise.
        cell: distance between neighbouring patches, likewise.

    Returns:
        (..., pairs), differentiable.

    Raises:
        OptionError: `schedule` is unknown.
    """
    check_schedule(schedule)
    if schedule == "none":
        return freqs
    scale = scale[..., None].to(freqs)
    if schedule == "rescale":
        return freqs / scale
    if schedule == "align_corners":
        step = cell[..., None].to(freqs) if isinstance(cell, Tensor) else cell
        trained = length[..., None].to(freqs) / step
        span = scale * trained - 1
        # a side of one patch has no span; its only coordinate is mapped to 0
        factor = torch.where(span > 1e-6, (trained - 1) / span.clamp(min=1e-6), torch.zeros_like(span))
        return freqs * factor
    # all other schedules leave smaller grids unchanged
    scale = scale.clamp(min=1)
    pairs = freqs.shape[-1]
    if schedule == "pi":
        return freqs / scale
    if schedule == "ntk":
        # 0 for the first (highest) frequency, 1 for the last
        exponent = torch.arange(pairs, dtype=freqs.dtype, device=freqs.device) / max(pairs - 1, 1)
        return freqs / scale**exponent
    # number of rotations of each pair within the training length, (..., pairs)
    magnitude = freqs.detach().abs()
    rotations = magnitude * length[..., None].to(freqs) / (2 * math.pi)
    fast, slow = (math.log(b) for b in BETAS)
    # 0: unchanged, 1: interpolated; linear in the logarithm of the rotations
    blend = ((fast - rotations.clamp(min=1e-30).log()) / (fast - slow)).clamp(0, 1)
    # pairs with wavelengths below 4 patches are not interpolated
    step = cell[..., None].to(freqs) if isinstance(cell, Tensor) else cell
    blend = blend.masked_fill(magnitude * step > 2 * math.pi / 4, 0.0)
    return freqs * (1 - blend) + freqs / scale * blend


def check_schedule(schedule: str) -> None:
    """Raise `OptionError` unless `grid_frequencies` supports `schedule`."""
    if schedule not in get_args(Schedule):
        raise OptionError(f"schedule must be one of {', '.join(get_args(Schedule))}, got {schedule!r}.")


def p_rope(freqs: Tensor, share: float) -> Tensor:
    """Return the frequencies with all but the highest fraction `share` (rounded down) set to 0: p-RoPE.

    Source: arXiv 2410.06205.

    Raises:
        OptionError: `share` is not in [0, 1].
    """
    if not 0 <= share <= 1:
        raise OptionError(f"p_rope: share must be a fraction from 0 to 1, got share={share}.")
    count = int(share * freqs.shape[-1])
    # rank of each pair by descending frequency
    rank = freqs.argsort(-1, descending=True).argsort(-1)
    return torch.where(rank < count, freqs, torch.zeros_like(freqs))


def cosine_similarity_bound(freqs: Tensor, side: int) -> Tensor:
    """Return ``sum_i cos(m * freqs_i)`` for m = 0 .. side: the excess score of similar tokens at offset m."""
    steps = torch.arange(side + 1, dtype=freqs.dtype, device=freqs.device)
    return (steps[:, None] * freqs).cos().sum(-1)


def min_base(pairs: int, side: int) -> float:
    """Return the smallest base for which similar tokens score at least as high as unrelated ones up to `side`.

    That is, `cosine_similarity_bound` of ``base ** (-i / pairs)`` is non-negative for m = 0 .. side;
    searched in steps of 1 %. With two axes it is sufficient for each axis separately.

    Raises:
        OptionError: `pairs` or `side` is below 1, or there is no such base.
    """
    if pairs < 1 or side < 1:
        raise OptionError(f"min_base needs pairs >= 1 and side >= 1, got pairs={pairs}, side={side}.")
    exponent = torch.arange(pairs, dtype=torch.float64) / pairs
    for k in range(1, 3000):
        base = 1.01**k
        if (cosine_similarity_bound(base**-exponent, side) >= 0).all():
            return base
    raise OptionError(
        f"min_base: no base below {1.01**3000:.1e} is sufficient, got side={side}, pairs={pairs}. Use more pairs."
    )
