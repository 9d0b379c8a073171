"""Pairs of channels divided among the axes: how many each axis has, and their angles."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from vispe.encodings.parts.coords import exact_device
from vispe.errors import OptionError, ShapeError, counted
from vispe.grid import Positions
from vispe.grid.frequencies import inverse_frequencies


def check_split(name: str, split: tuple[int, ...] | None, pairs: int) -> None:
    """Raise `OptionError` if `split` exceeds the number of pairs."""
    if split is not None and sum(split) > pairs:
        raise OptionError(
            f"split needs a number of pairs above 0 per axis, at most {pairs} in total for {name}, "
            f"got split={list(split)}."
        )


def pair_counts(name: str, split: tuple[int, ...] | None, pairs: int, axes: int) -> list[int]:
    """Return the pairs of each axis, in the order of the axes."""
    if split is None:
        counts = [pairs // axes] * axes  # remaining pairs are not rotated
        if not counts[0]:
            raise ShapeError(
                f"{name} needs a pair of channels per axis, got {counted(pairs, 'pair')} for {counted(axes, 'axis')}."
            )
        return counts
    if len(split) != axes:
        raise ShapeError(
            f"{name} needs split for {counted(axes, 'axis')}, got split={split}. Pass pairs per axis."
        )
    return list(split)


def axial_angles(
    coords: Tensor,
    freqs: list[Tensor],
    order: Sequence[int],
    pairs: int,
    unrotated: int = 0,
    alternate: bool = False,
) -> Tensor:
    """Return angles (b or 1, 1, n, pairs): zeros, axis after axis in `order`, then zeros.

    Args:
        coords: (b or 1, n, a).
        freqs: per axis (b or 1, pairs of the axis).
        order: axes, in the order of their channels.
        pairs: total number of pairs.
        unrotated: leading pairs that are not rotated.
        alternate: axes alternate from pair to pair instead, for axes with equal numbers of pairs.
    """
    # of shape (b or 1, n, 1) * (b or 1, 1, pairs of the axis)
    parts = [coords[..., axis, None] * freqs[axis][:, None].to(coords) for axis in order]
    # alternating: (b, n, pairs of an axis, axes) -> (b, n, pairs)
    angle = torch.stack(parts, -1).flatten(-2) if alternate else torch.cat(parts, -1)
    rest = pairs - unrotated - angle.shape[-1]
    return F.pad(angle, (unrotated, rest))[:, None] if unrotated or rest else angle[:, None]


def even_counts(total: int, axes: int) -> list[int]:
    """Divide `total` among the axes as evenly as possible; the first axes get the remainder."""
    return [total // axes + (i < total % axes) for i in range(axes)]


def spread_angles(pos: Positions, counts: Sequence[int], base: float) -> Tensor:
    """Return coordinates times frequencies (b or 1, 1, n, sum of counts), the last axis first.

    Args:
        pos: positions.
        counts: number of frequencies per axis, first axis first; frequency c of C is ``base ** (-c / C)``.
        base: ratio of the first to the (C + 1)-th frequency.
    """
    # float64 powers: a rounding error of the frequency grows with the coordinate
    exact = exact_device(pos.coords)
    freqs = [inverse_frequencies(2 * n, base, torch.float64)[None].to(exact) for n in counts]
    return axial_angles(pos.coords, freqs, [*reversed(range(pos.axes))], sum(counts))
