"""Angles of pairs of channels from coordinates, their cosines and sines, and frequencies of a single axis."""

from __future__ import annotations

import torch
from torch import Tensor

from vispe.errors import OptionError, ShapeError, UnsupportedCombination, counted
from vispe.multimodal.allocation import ZERO, T
from vispe.multimodal.streams.torch_typing import check_exact, listed


def angles(ids: Tensor, frequencies: Tensor, axis_of_pair: Tensor) -> Tensor:
    """Return the angle of every pair of channels, in radians.

    Integers below 2 ** 24 are multiplied in float32, as in language models, so that the angles of text are
    bitwise those of the model; all other coordinates are multiplied in float64 and rounded once.

    Args:
        ids: coordinates (axes, b, s): float64, float32 or integers.
        frequencies: radians per step (pairs,), float32.
        axis_of_pair: (pairs,) or (heads, pairs), see `vispe.multimodal.allocation`; or the axis of each channel in the
            layout of halves, (2 pairs,), whose channels c and c + pairs have the frequency of pair c.

    Returns:
        (b, s, pairs), (b, heads, s, pairs) or (b, s, 2 pairs), float32.

    Raises:
        ShapeError: the allocation refers to a missing axis, or the numbers of pairs differ.
        InputError: `ids` have another dtype, such as bfloat16, which rounds positions.

    Example:
        >>> from vispe.grid.frequencies import inverse_frequencies
        >>> ids = torch.tensor([[[0.0, 1.0, 2.0]]], dtype=torch.float64)  # one axis, three tokens
        >>> angles(ids, inverse_frequencies(4, 100.0), torch.zeros(2, dtype=torch.long))
        tensor([[[0.0000, 0.0000],
                 [1.0000, 0.1000],
                 [2.0000, 0.2000]]])
    """
    check_exact("ids", ids)
    if is_by_channel(axis_of_pair, frequencies):
        frequencies = frequencies.repeat(2)
    if axis_of_pair.shape[-1] != frequencies.shape[0]:
        raise ShapeError(
            f"The allocation has {counted(axis_of_pair.shape[-1], 'pair')} of channels, but there are "
            f"{counted(frequencies.shape[0], 'frequency')}. Sections must add up to head_dim / 2."
        )
    if _readable(axis_of_pair) and int(axis_of_pair.max()) >= len(ids):
        raise ShapeError(
            f"The allocation refers to axis {int(axis_of_pair.max())}, but the coordinates have "
            f"{counted(len(ids), 'axis')}. Use both from the same scheme."
        )
    axis_of_pair = axis_of_pair.to(ids.device)
    if axis_of_pair.ndim == 2:
        return torch.stack([angles(ids, frequencies, row) for row in axis_of_pair.unbind()], 1)
    frequencies = torch.where(axis_of_pair == ZERO, 0.0, frequencies.float())
    position = ids.double().movedim(0, -1).index_select(-1, axis_of_pair.clamp(min=0))
    narrow = position.float()
    exact = (position * frequencies.double()).float()
    is_integer = (position == position.round()) & (position.abs() < 2**24)
    return torch.where(is_integer, narrow * frequencies, exact)


def is_by_channel(axis_of_pair: Tensor, frequencies: Tensor) -> bool:
    """Return whether an allocation has an axis for each channel instead of each pair."""
    return axis_of_pair.ndim == 1 and axis_of_pair.shape[0] == 2 * frequencies.shape[0]


def _readable(x: Tensor) -> bool:
    """Whether values can be read without a device synchronisation or a graph break."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def tables(
    ids: Tensor,
    frequencies: Tensor,
    axis_of_pair: Tensor,
    scaling: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of `angles`, times `scaling`, cast to `dtype` last; shapes as `angles`.

    Raises:
        ShapeError: the allocation refers to a missing axis, or the numbers of pairs differ.
        InputError: `ids` have a dtype that rounds positions.

    Example:
        >>> ids = torch.zeros(1, 1, 3, dtype=torch.float64)
        >>> cos, sin = tables(ids, torch.ones(2), torch.zeros(2, dtype=torch.long))
        >>> cos.shape, float(cos.min()), float(sin.max())
        (torch.Size([1, 3, 2]), 1.0, 0.0)
    """
    theta = angles(ids, frequencies, axis_of_pair)
    return (theta.cos() * scaling).to(dtype), (theta.sin() * scaling).to(dtype)


def on_axis(frequencies: Tensor, scaled: Tensor, axis_of_pair: Tensor, axis: int = T) -> Tensor:
    """Return `scaled` for the pairs of channels rotated by one axis, and `frequencies` for all others (pairs,).

    With YaRN frequencies on the time axis, this is YaRN-V of VideoRoPE++, for videos longer than in training:
    rows and columns are unchanged. It needs a scheme whose time has low frequencies: under `mrope`, whose
    time has the highest frequencies, YaRN changes few or none of them. Text is also rotated by the pairs of
    time, so it changes with the schedule. Not compared with the authors' code; in particular, it is unknown
    whether they scale cosines and sines, as YaRN does (`vispe.grid.yarn.yarn_mscale`, argument
    `scaling` of `tables`).

    Args:
        frequencies: radians per step (pairs,).
        scaled: frequencies of a schedule (pairs,), such as `vispe.grid.yarn.yarn`, for all pairs.
        axis_of_pair: (pairs,), the result of a scheme's `allocation`.
        axis: axis whose pairs are scaled; by default 0, time in schemes with three axes.

    Raises:
        ShapeError: the number of frequencies differs from that of pairs.
        UnsupportedCombination: axes differ between heads, while frequencies are shared by heads.
        OptionError: the axis rotates no pair.

    Example:
        >>> import torch
        >>> from vispe.grid.frequencies import inverse_frequencies
        >>> from vispe.grid.yarn import yarn
        >>> from vispe.multimodal import create_scheme
        >>> plain, longer = inverse_frequencies(128, 1e6), yarn(128, 1e6, scale=4.0, length=32768)
        >>> axis = create_scheme("videorope").allocation(64)
        >>> mixed = on_axis(plain, longer, axis)
        >>> torch.equal(mixed[:48], plain[:48]), torch.equal(mixed[48:], longer[48:])
        (True, True)
    """
    if axis_of_pair.ndim == 2:
        raise UnsupportedCombination(
            "on_axis needs an allocation shared by all heads, got one per head. Use a scheme whose allocation "
            "is (pairs,), such as mrope_i or videorope."
        )
    for name, values in (("frequencies", frequencies), ("scaled", scaled)):
        if values.shape != axis_of_pair.shape:
            raise ShapeError(
                f"The allocation has {counted(len(axis_of_pair), 'pair')} of channels, but {name} has the shape "
                f"{tuple(values.shape)}."
            )
    selected = axis_of_pair.to(frequencies.device) == axis
    if axis < 0 or not bool(selected.any()):
        raise OptionError(
            f"Axis {axis} rotates no pair of channels in this allocation. Its axes are "
            f"{sorted({n for n in listed(axis_of_pair) if n >= 0})}."
        )
    return torch.where(selected, scaled.to(frequencies), frequencies)
