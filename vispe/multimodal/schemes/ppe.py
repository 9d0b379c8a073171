"""PPE: a merged token keeps the positions of several of the tokens that it was made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from vispe.attention.transform.abstract_transform import Transform
from vispe.attention.transform.pairs import PairRotation
from vispe.errors import InputError, ShapeError
from vispe.multimodal import allocation
from vispe.multimodal.registry import register_scheme
from vispe.multimodal.rotary import rotation
from vispe.multimodal.scheme import Coordinates
from vispe.multimodal.schemes.mrope import MRoPE, MRoPEInterleaved
from vispe.multimodal.sections import sections_for
from vispe.multimodal.streams.token_merging import merge_tokens
from vispe.multimodal.streams.token_stream import Stream
from vispe.options import Whole


@register_scheme
@dataclass(frozen=True)
class PPE(MRoPE):
    """MRoPE with k positions for each token, in parts of the pairs of each axis (arXiv 2510.22936).

    Coordinates are t_1 .. t_k, h_1 .. h_k, w_1 .. w_k. Those of tokens that are not merged are k times the same, so
    text and whole pictures are encoded as by `MRoPE`, and k = 1 is `MRoPE`. `merge` makes tokens that differ.

    Options are those of `MRoPE` and

    Args:
        k: positions of a token, K.
        bands: how the pairs of an axis are shared out among its positions: ``'chunked'``, the highest frequencies to
            the first and so on; or ``'interleaved'``, in turn, so that each position has high and low ones.
        axes_in_turn: axes take turns over the frequencies as in `mrope_i`, for models that have them so.

    Differs from the reference: where k does not divide every section, its parts are as equal as can be;
    `reference_rotation` has what the authors' code does.
    """

    name: ClassVar[str] = "ppe"
    summary: ClassVar[str] = "MRoPE with the positions of several members for each merged token."
    paper: ClassVar[str] = "Positional Preservation Embedding, https://arxiv.org/abs/2510.22936"

    k: Whole = 8
    bands: Literal["chunked", "interleaved"] = "chunked"
    axes_in_turn: bool = False

    @property
    def axes(self) -> int:
        """Three for each position."""
        return 3 * self.k

    def coordinates(
        self,
        stream: Stream,
        *,
        start: Tensor | None = None,
        training: bool = False,
        generator: torch.Generator | None = None,
        draws: Tensor | None = None,
        padding: float = 0,
    ) -> Coordinates:
        """Return the coordinates of `MRoPE`, each k times; see `Scheme.coordinates`."""
        once = replace(self, k=1)
        found = super(PPE, once).coordinates(
            stream, start=start, training=training, generator=generator, draws=draws, padding=padding
        )
        return replace(found, ids=found.ids.repeat_interleave(self.k, 0), scheme=self)

    def text(self, at: Tensor) -> Tensor:
        """Return the counter on all axes, or on those of time."""
        same = at.expand(self.k, *at.shape)
        others = same if self.text_axes == "all" else torch.zeros_like(same)
        return torch.cat([same, others, others])

    def allocation(self, pairs: int, kv_heads: int = 1) -> Tensor:
        """Return the coordinate of every pair (pairs,)."""
        share = MRoPEInterleaved.share if self.axes_in_turn else self.share
        pattern = allocation.interleaved if self.axes_in_turn else allocation.chunked
        axis = pattern(sections_for(pairs, self.sections, share))
        return allocation.sub_bands(axis, self.k, self.bands == "interleaved")

    def merge(
        self, coordinates: Coordinates, tokens: Tensor, labels: Tensor, epsilon: float = 0.0
    ) -> tuple[Tensor, Coordinates]:
        """Return merged tokens (b, m, c) and their coordinates; what follows keeps its position.

        Args:
            coordinates: of the tokens before they are merged, by this scheme.
            tokens: (b, s, c).
            labels: (b, s), place of each token's merged token; text and what is not merged has labels of its own,
                and padding is below 0. See `vispe.multimodal.streams.token_merging.merge_tokens`, also for merging in stages.
            epsilon: see there.

        Raises:
            ShapeError: the coordinates are not those of this scheme.
            InputError: they are of merged tokens.
        """
        if len(coordinates.ids) != self.axes:
            raise ShapeError(f"{self} has {self.axes} coordinates; got {len(coordinates.ids)}.")
        once = coordinates.ids[:: self.k]
        if not torch.equal(once.repeat_interleave(self.k, 0), coordinates.ids):
            raise InputError("These tokens are merged already; merge them once more with merge_tokens.")
        merged = merge_tokens(tokens, labels, once, members=self.k, epsilon=epsilon)
        return merged.tokens, Coordinates(merged.ids, merged.mask, coordinates.next, self)


class HalvesRotation(Transform):
    """Turn the first half of the channels by one rotation and the second half by another; see `reference_rotation`."""

    __slots__ = ("first", "second")

    def __init__(self, first: PairRotation, second: PairRotation) -> None:
        self.first, self.second = first, second

    def query(self, q: Tensor) -> Tensor:
        """Turn queries (b, h, n, d_h)."""
        return self._halves(self.first.query(q), self.second.query(q))

    def key(self, k: Tensor) -> Tensor:
        """Turn keys (b, h_kv, m, d_h)."""
        return self._halves(self.first.key(k), self.second.key(k))

    @staticmethod
    def _halves(first: Tensor, second: Tensor) -> Tensor:
        pairs = first.shape[-1] // 2
        return torch.cat([first[..., :pairs], second[..., pairs:]], -1)


def reference_sections(sections: Sequence[int], k: int) -> tuple[int, ...]:
    """Return the widths of the bands in the authors' code: sections in k parts; 1 each where k does not divide all."""
    if any(s % k for s in sections):
        return (1,) * sum(sections)
    return tuple(s // k for s in sections for _ in range(k))


def reference_rotation(ids: Tensor, frequencies: Tensor, sections: Sequence[int], k: int) -> HalvesRotation:
    """Return what the authors' code does to queries and keys, layout ``'half'``.

    Its bands run on through both halves of the channels, and band n takes coordinate ``n mod 3 k``. Where k does not
    divide every section the two channels of a pair may see different positions: no rotation any more for merged
    tokens. Text is turned as by `MRoPE` all the same.

    Args:
        ids: (3 k, b, s).
        frequencies: (pairs,).
        sections: pairs of time, rows and columns.
        k: positions of a token.
    """
    widths = torch.tensor(reference_sections(sections, k) * 2)
    coordinate = (torch.arange(len(widths)) % (3 * k)).repeat_interleave(widths)
    first, second = (rotation(ids, frequencies, half) for half in coordinate.chunk(2))
    return HalvesRotation(first, second)
