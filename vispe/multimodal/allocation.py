"""Allocation of coordinate axes to pairs of channels: an axis index per pair, or per pair and head.

Pair 0 has the highest frequency. `ZERO` stands for no rotation (cos 1, sin 0).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vispe.errors import OptionError, counted

ZERO = -1
T, H, W = 0, 1, 2


def single(pairs: int) -> Tensor:
    """Return axis 0 for every pair, (pairs,): rotary embedding of one position."""
    return torch.zeros(pairs, dtype=torch.long)


def chunked(sections: Sequence[int]) -> Tensor:
    """Return s_0 pairs of axis 0, then s_1 of axis 1, and so on, (sum of sections,): MRoPE (arXiv 2409.12191)."""
    return torch.arange(len(sections)).repeat_interleave(torch.tensor(list(sections)))


def interleaved(sections: Sequence[int], clip: bool = False) -> Tensor:
    """Return t h w t h w ..., then t for the remaining pairs, (sum of sections,): MRoPE-I (arXiv 2510.23095).

    Rows take pairs 1, 4, 7, ... below ``3 s_h``, columns 2, 5, 8, ... below ``3 s_w``.

    Args:
        sections: pairs of time, rows and columns.
        clip: allow fewer pairs for rows and columns than their sections if there are not enough.

    Raises:
        OptionError: rows or columns need more pairs than available, and `clip` is false.
    """
    axis = single(sum(sections))
    for offset, count in ((H, sections[H]), (W, sections[W])):
        if offset + 3 * (count - 1) >= len(axis) and not clip:
            raise OptionError(
                f"sections={list(sections)} cannot be interleaved: {counted(count, 'pair')} at a distance of 3 do "
                f"not fit into {len(axis)}. Give time at least as many pairs as rows and columns."
            )
        axis[offset : 3 * count : 3] = offset
    return axis


def distributed(pairs: int) -> Tensor:
    """Return the pattern t t h w h w h w over all pairs, (pairs,): MM-RoPE."""
    return cycle((T, T, H, W, H, W, H, W), pairs)


def cycle(axes: Sequence[int], pairs: int) -> Tensor:
    """Return a pattern of axes repeated over all pairs, (pairs,)."""
    return torch.tensor(list(axes))[torch.arange(pairs) % len(axes)]


def video(sections: Sequence[int], time: int = T, lead: bool = False) -> Tensor:
    """Return h w h w ..., then `time` for the lowest frequencies, (sum of sections,): VideoRoPE (arXiv 2502.05173).

    With ``time=ZERO``, the lowest frequencies are not rotated: HoPE (arXiv 2505.20444). With `lead`, pair 0
    also belongs to `time`, and h and w follow up to pairs ``2 s_h`` and ``2 s_w`` (excluded), as in the
    package Multimodal-RoPEs.
    """
    if lead:
        axis = torch.full((sum(sections),), time)
        axis[1 : 2 * sections[H] : 2] = H
        axis[2 : 2 * sections[W] : 2] = W
        return axis
    axis = cycle((H, W), sum(sections))
    axis[sections[H] + sections[W] :] = time
    return axis


def multi_head(sections: Sequence[int], heads: int, pairs: int) -> Tensor:
    """Return one axis for all pairs of a key head, (heads, pairs); heads beyond the sections are not rotated: MHRoPE.

    Raises:
        OptionError: the sections have more heads than the model.
    """
    if sum(sections) > heads:
        raise OptionError(
            f"sections={list(sections)} name {counted(sum(sections), 'key head')}, but the model has {heads}. Use "
            "fewer."
        )
    axis = torch.full((heads,), ZERO)
    axis[: sum(sections)] = chunked(sections)
    return axis[:, None].repeat(1, pairs)


def sub_bands(axis_of_pair: Tensor, members: int, interleaved: bool = False) -> Tensor:
    """Return the coordinate index of each pair for several positions per axis, (pairs,): PPE (arXiv 2510.22936).

    Coordinates are t_1 .. t_K, h_1 .. h_K, w_1 .. w_K for K members. The pairs of an axis, from high to low
    frequencies, are divided among its members in K parts, as equal as possible, or alternate if `interleaved`.
    """
    is_axis = axis_of_pair[:, None] == torch.arange(int(axis_of_pair.max()) + 1)  # (pairs, axes)
    # index among the pairs of its axis
    number = is_axis.long().cumsum(0).gather(1, axis_of_pair[:, None])[:, 0] - 1
    member = number % members if interleaved else number * members // is_axis.sum(0)[axis_of_pair]
    return axis_of_pair * members + member
