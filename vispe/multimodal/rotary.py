"""Tables of cosines and sines from coordinates, and conversion between the two layouts of rotary channels."""

from __future__ import annotations

import torch
from torch import Tensor

from vispe.attention.transform.abstract_transform import Layout, Transform
from vispe.attention.transform.pairs import PairRotation
from vispe.errors import OptionError, ShapeError, UnsupportedCombination, counted
from vispe.multimodal.allocation import ZERO, T
from vispe.multimodal.streams.torch_typing import check_exact, listed, unfolded


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
    if _is_by_channel(axis_of_pair, frequencies):
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


def _is_by_channel(axis_of_pair: Tensor, frequencies: Tensor) -> bool:
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


class HalvesRotation(Transform):
    """Separate angles for the first and the second half of the rotated channels, for the layout ``'half'`` only.

    Channel c is ``x_c cos a_c - x_(c + pairs) sin a_c``, channel c + pairs is ``x_(c + pairs) cos b_c + x_c sin b_c``.
    It is a rotation where the angles a and b are equal.
    """

    __slots__ = ("first", "second")

    def __init__(self, first: PairRotation, second: PairRotation) -> None:
        self.first, self.second = first, second

    def with_backend(self, backend: str) -> HalvesRotation:
        """Return the same rotations for a call with the selected backend."""
        return HalvesRotation(self.first.with_backend(backend), self.second.with_backend(backend))

    def query(self, q: Tensor) -> Tensor:
        """Rotate queries (b, h, n, d_h)."""
        return self._halves(self.first.query(q), self.second.query(q))

    def key(self, k: Tensor) -> Tensor:
        """Rotate keys (b, h_kv, m, d_h)."""
        return self._halves(self.first.key(k), self.second.key(k))

    def _halves(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the first half of the rotated channels from `first`, and all other channels from `second`."""
        pairs = self.first.cos.shape[-1]
        return torch.cat([first[..., :pairs], second[..., pairs:]], -1)


def rotation(
    ids: Tensor, frequencies: Tensor, axis_of_pair: Tensor, scaling: float = 1.0, layout: Layout = "half"
) -> PairRotation | HalvesRotation:
    """Return the rotation of queries (b, h, s, d_h) and keys (b, h_kv, s, d_h) by `angles`.

    Raises:
        UnsupportedCombination: the allocation has an axis for each channel, and the layout is not ``'half'``.
        ShapeError: the allocation refers to a missing axis, or the numbers of pairs differ.
        InputError: `ids` have a dtype that rounds positions.

    Example:
        >>> from vispe.multimodal import Image, Stream, Text, create_scheme
        >>> scheme = create_scheme("mrope")
        >>> coordinates = scheme.coordinates(Stream.of([[Text(2), Image(1, 2)]]))
        >>> transform = rotation(coordinates.ids, torch.ones(64), scheme.allocation(64))
        >>> transform.query(torch.ones(1, 2, 4, 128)).shape
        torch.Size([1, 2, 4, 128])
    """
    cos, sin = tables(ids, frequencies, axis_of_pair, scaling)
    if cos.ndim == 4:
        return PairRotation(cos, sin, layout)
    if not _is_by_channel(axis_of_pair, frequencies):
        return PairRotation(cos[:, None], sin[:, None], layout)
    if layout != "half":
        raise UnsupportedCombination(
            f"An allocation with an axis for each channel needs layout='half', got {layout!r}. Use a scheme with an "
            "axis for each pair, such as xdrope with layout='paired'."
        )
    halves = zip(cos[:, None].chunk(2, -1), sin[:, None].chunk(2, -1), strict=True)
    return HalvesRotation(*(PairRotation(*half, layout) for half in halves))


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


def to_interleaved(x: Tensor, dim: int = -1) -> Tensor:
    """Reorder the channels of one head along `dim` from halves (c, c + pairs) to neighbours (2 c, 2 c + 1).

    Apply it to the rows of q and k projections, head by head, to run weights of one layout with the other.

    Raises:
        ShapeError: the number of channels is odd.

    Example:
        >>> to_interleaved(torch.arange(6))
        tensor([0, 3, 1, 4, 2, 5])
    """
    pairs = _pairs(x, dim)
    return (
        unfolded(x, dim, (2, pairs))
        .transpose(dim - 1 if dim < 0 else dim, dim if dim < 0 else dim + 1)
        .flatten(*((dim - 1, dim) if dim < 0 else (dim, dim + 1)))
    )


def to_half(x: Tensor, dim: int = -1) -> Tensor:
    """Undo `to_interleaved`.

    Raises:
        ShapeError: the number of channels is odd.

    Example:
        >>> to_half(torch.tensor([0, 3, 1, 4, 2, 5]))
        tensor([0, 1, 2, 3, 4, 5])
    """
    pairs = _pairs(x, dim)
    return (
        unfolded(x, dim, (pairs, 2))
        .transpose(dim - 1 if dim < 0 else dim, dim if dim < 0 else dim + 1)
        .flatten(*((dim - 1, dim) if dim < 0 else (dim, dim + 1)))
    )


def _pairs(x: Tensor, dim: int) -> int:
    if x.shape[dim] % 2:
        raise ShapeError(
            f"Rotary embeddings need an even number of channels, got {x.shape[dim]} in dimension {dim}."
        )
    return x.shape[dim] // 2
