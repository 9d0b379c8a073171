"""From coordinates to tables of cosines and sines, and between the two layouts of rotary channels."""

from __future__ import annotations

import torch
from torch import Tensor

from vispe.attention.transform.abstract_transform import Layout
from vispe.attention.transform.pairs import PairRotation
from vispe.errors import OptionError, ShapeError, UnsupportedCombination
from vispe.multimodal.allocation import ZERO, T
from vispe.multimodal.streams.torch_typing import listed, unfolded


def angles(ids: Tensor, frequencies: Tensor, axis_of_pair: Tensor) -> Tensor:
    """Return the angle of every pair of channels, in radians.

    Whole numbers below 2 ** 24 are multiplied in float32, as language models do, so that text keeps its angles to
    the last bit; all others in float64, rounded once.

    Args:
        ids: coordinates (axes, b, s), float64.
        frequencies: radians per step (pairs,), float32.
        axis_of_pair: (pairs,) or (heads, pairs), as `vispe.multimodal.allocation` makes it.

    Returns:
        (b, s, pairs) or (b, heads, s, pairs), float32.

    Raises:
        ShapeError: an axis is asked for that the coordinates do not have, or the pairs do not agree.
    """
    if axis_of_pair.shape[-1] != frequencies.shape[0]:
        raise ShapeError(
            f"The allocation names {axis_of_pair.shape[-1]} pairs of channels; there are {frequencies.shape[0]} "
            "frequencies. Let the sections add up to half the width of a head."
        )
    if _readable(axis_of_pair) and int(axis_of_pair.max()) >= len(ids):
        raise ShapeError(
            f"The allocation asks for axis {int(axis_of_pair.max())}, but the coordinates have {len(ids)} axes; take "
            "both from the same scheme."
        )
    axis_of_pair = axis_of_pair.to(ids.device)
    if axis_of_pair.ndim == 2:
        return torch.stack([angles(ids, frequencies, row) for row in axis_of_pair.unbind()], 1)
    frequencies = torch.where(axis_of_pair == ZERO, 0.0, frequencies.float())
    position = ids.double().movedim(0, -1).index_select(-1, axis_of_pair.clamp(min=0))
    narrow = position.float()
    exact = (position * frequencies.double()).float()
    whole = (position == position.round()) & (position.abs() < 2**24)
    return torch.where(whole, narrow * frequencies, exact)


def _readable(x: Tensor) -> bool:
    """Whether looking at the values costs no wait for a device, nor a break in a compiled graph."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def tables(
    ids: Tensor,
    frequencies: Tensor,
    axis_of_pair: Tensor,
    scaling: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of `angles`, times `scaling`, cast to `dtype` last; shapes as `angles`."""
    turned = angles(ids, frequencies, axis_of_pair)
    return (turned.cos() * scaling).to(dtype), (turned.sin() * scaling).to(dtype)


def rotation(
    ids: Tensor, frequencies: Tensor, axis_of_pair: Tensor, scaling: float = 1.0, layout: Layout = "half"
) -> PairRotation:
    """Return the rotation of queries (b, h, s, d_h) and keys (b, h_kv, s, d_h) by `angles`."""
    cos, sin = tables(ids, frequencies, axis_of_pair, scaling)
    return (
        PairRotation(cos, sin, layout) if cos.ndim == 4 else PairRotation(cos[:, None], sin[:, None], layout)
    )


def on_axis(frequencies: Tensor, scaled: Tensor, axis_of_pair: Tensor, axis: int = T) -> Tensor:
    """Return `scaled` for the pairs of channels that one axis turns, and `frequencies` for all others (pairs,).

    With YaRN's frequencies on the axis of time that is YaRN-V of VideoRoPE++, for videos longer than in training:
    rows and columns stay as they were learnt. It needs a scheme whose time has low frequencies: under `mrope`, whose
    time has the highest, YaRN leaves most or all of them alone. Text is turned by the pairs of time as well, so it
    changes where a schedule changes them. Not compared with the authors' code; in particular whether they multiply
    cosines and sines, as YaRN does (`vispe.grid.frequencies.yarn_mscale`, argument `scaling` of `tables`), is open.

    Args:
        frequencies: radians per step (pairs,).
        scaled: those of a schedule of `vispe.grid.frequencies` (pairs,), for all pairs.
        axis_of_pair: (pairs,), of a scheme's `allocation`.
        axis: the axis whose pairs are scaled; by default 0, which is time in schemes of three axes.

    Raises:
        ShapeError: there are not as many frequencies as pairs.
        UnsupportedCombination: each head has an axis of its own; frequencies are those of all heads.
        OptionError: the axis turns no pair.

    Example:
        >>> import torch
        >>> from vispe.grid.frequencies import inverse_frequencies, yarn
        >>> from vispe.multimodal import create_scheme
        >>> plain, longer = inverse_frequencies(128, 1e6), yarn(128, 1e6, scale=4.0, length=32768)
        >>> axis = create_scheme("videorope").allocation(64)
        >>> mixed = on_axis(plain, longer, axis)
        >>> torch.equal(mixed[:48], plain[:48]), torch.equal(mixed[48:], longer[48:])
        (True, True)
    """
    if axis_of_pair.ndim == 2:
        raise UnsupportedCombination(
            "Each head has an axis of its own, but frequencies are those of all heads; take a scheme whose allocation "
            "is (pairs,), such as mrope_i or videorope."
        )
    for name, given in (("frequencies", frequencies), ("scaled", scaled)):
        if given.shape != axis_of_pair.shape:
            raise ShapeError(
                f"The allocation names {len(axis_of_pair)} pairs of channels; {name} has the shape "
                f"{tuple(given.shape)}."
            )
    own = axis_of_pair.to(frequencies.device) == axis
    if axis < 0 or not bool(own.any()):
        raise OptionError(
            f"Axis {axis} turns no pair of channels in this allocation; its axes are "
            f"{sorted({n for n in listed(axis_of_pair) if n >= 0})}."
        )
    return torch.where(own, scaled.to(frequencies), frequencies)


def to_interleaved(x: Tensor, dim: int = -1) -> Tensor:
    """Reorder the channels of one head along `dim` from halves (c, c + pairs) to neighbours (2 c, 2 c + 1).

    Apply it to the rows of q and k projections, head by head, to run weights of one layout with the other.
    """
    pairs = _pairs(x, dim)
    return (
        unfolded(x, dim, (2, pairs))
        .transpose(dim - 1 if dim < 0 else dim, dim if dim < 0 else dim + 1)
        .flatten(*((dim - 1, dim) if dim < 0 else (dim, dim + 1)))
    )


def to_half(x: Tensor, dim: int = -1) -> Tensor:
    """Undo `to_interleaved`."""
    pairs = _pairs(x, dim)
    return (
        unfolded(x, dim, (pairs, 2))
        .transpose(dim - 1 if dim < 0 else dim, dim if dim < 0 else dim + 1)
        .flatten(*((dim - 1, dim) if dim < 0 else (dim, dim + 1)))
    )


def _pairs(x: Tensor, dim: int) -> int:
    if x.shape[dim] % 2:
        raise ShapeError(f"Rotary channels come in pairs; dimension {dim} has {x.shape[dim]} channels.")
    return x.shape[dim] // 2
