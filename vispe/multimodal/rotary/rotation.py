"""Rotation of queries and keys by the coordinates of their tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from vispe.attention.transform.abstract_transform import Layout, Transform
from vispe.attention.transform.pairs import PairRotation
from vispe.errors import UnsupportedCombination
from vispe.multimodal.rotary.angles import is_by_channel, tables


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
    if not is_by_channel(axis_of_pair, frequencies):
        return PairRotation(cos[:, None], sin[:, None], layout)
    if layout != "half":
        raise UnsupportedCombination(
            f"An allocation with an axis for each channel needs layout='half', got {layout!r}. Use a scheme with an "
            "axis for each pair, such as xdrope with layout='paired'."
        )
    halves = zip(cos[:, None].chunk(2, -1), sin[:, None].chunk(2, -1), strict=True)
    return HalvesRotation(*(PairRotation(*half, layout) for half in halves))
