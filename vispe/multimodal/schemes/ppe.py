"""PPE: merged tokens that keep the positions of several of their source tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from vispe.attention.transform.pairs import PairRotation
from vispe.errors import InputError, ShapeError, counted
from vispe.multimodal import allocation
from vispe.multimodal.coordinates import Coordinates
from vispe.multimodal.registry import register_scheme
from vispe.multimodal.rotary.angles import tables
from vispe.multimodal.rotary.rotation import HalvesRotation
from vispe.multimodal.schemes.mrope import MRoPE, MRoPEInterleaved
from vispe.multimodal.sections import sections_for
from vispe.multimodal.streams.token_merging import merge_tokens
from vispe.multimodal.streams.token_stream import Stream
from vispe.utils.options import PositiveInt


@register_scheme
@dataclass(frozen=True)
class PPE(MRoPE):
    """MRoPE with k positions per token, each in a part of the channel pairs of each axis (arXiv 2510.22936).

    Coordinates are t_1 .. t_k, h_1 .. h_k, w_1 .. w_k. The coordinates of unmerged tokens are repeated k
    times, so that text and unmerged images are encoded as by `MRoPE`; k = 1 is `MRoPE`. `merge` creates
    tokens with different members.

    Options are those of `MRoPE`, and:

    Args:
        k: number of positions per token, K.
        bands: division of the pairs of an axis among its positions: ``'chunked'``, the highest frequencies
            for the first position, and so on; or ``'interleaved'``, so that each position has high and low
            frequencies.
        axes_in_turn: interleave axes over the frequencies as in `mrope_i`, for models with this layout.

    Differs from the reference: if k does not divide a section, the parts of that section are as equal as
    possible; `reference_rotation` reproduces the authors' code.
    """

    name: ClassVar[str] = "ppe"
    summary: ClassVar[str] = "MRoPE with the positions of several members per merged token."
    paper: ClassVar[str] = "Positional Preservation Embedding, https://arxiv.org/abs/2510.22936"

    k: PositiveInt = 8
    bands: Literal["chunked", "interleaved"] = "chunked"
    axes_in_turn: bool = False

    @property
    def axes(self) -> int:
        """Three axes per position."""
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
        coordinates_once = super(PPE, once).coordinates(
            stream, start=start, training=training, generator=generator, draws=draws, padding=padding
        )
        return replace(coordinates_once, ids=coordinates_once.ids.repeat_interleave(self.k, 0), scheme=self)

    def text(self, at: Tensor) -> Tensor:
        """Return the counter on all axes, or only on the time axes."""
        counter = at.expand(self.k, *at.shape)
        others = counter if self.text_axes == "all" else torch.zeros_like(counter)
        return torch.cat([counter, others, others])

    def allocation(self, pairs: int, kv_heads: int = 1) -> Tensor:
        """Return the coordinate of every pair (pairs,)."""
        share = MRoPEInterleaved.share if self.axes_in_turn else self.share
        pattern = allocation.interleaved if self.axes_in_turn else allocation.chunked
        axis = pattern(sections_for(pairs, self.sections, share))
        return allocation.sub_bands(axis, self.k, self.bands == "interleaved")

    def merge(
        self, coordinates: Coordinates, tokens: Tensor, labels: Tensor, epsilon: float = 0.0
    ) -> tuple[Tensor, Coordinates]:
        """Return merged tokens (b, m, c) and their coordinates; later tokens keep their positions.

        Args:
            coordinates: coordinates of the unmerged tokens, by this scheme.
            tokens: (b, s, c).
            labels: (b, s), index of the merged token of each token; text and unmerged tokens have distinct labels,
                and padding is below 0. See `vispe.multimodal.streams.token_merging.merge_tokens`, also for merging in
                stages.
            epsilon: see `merge_tokens`.

        Raises:
            ShapeError: the coordinates are not those of this scheme.
            InputError: the tokens are already merged.
        """
        if len(coordinates.ids) != self.axes:
            raise ShapeError(f"{self} needs {counted(self.axes, 'coordinate')}, got {len(coordinates.ids)}.")
        once = coordinates.ids[:: self.k]
        if not torch.equal(once.repeat_interleave(self.k, 0), coordinates.ids):
            raise InputError(
                "PPE.merge needs unmerged tokens, got merged ones. Use merge_tokens to merge them again."
            )
        merged = merge_tokens(tokens, labels, once, members=self.k, epsilon=epsilon)
        return merged.tokens, Coordinates(merged.ids, merged.mask, coordinates.next, self)


def reference_sections(sections: Sequence[int], k: int) -> tuple[int, ...]:
    """Return the widths of the authors' bands: sections divided by k, or 1 each if k does not divide all of them."""
    if any(s % k for s in sections):
        return (1,) * sum(sections)
    return tuple(s // k for s in sections for _ in range(k))


def reference_rotation(ids: Tensor, frequencies: Tensor, sections: Sequence[int], k: int) -> HalvesRotation:
    """Return the transform of queries and keys in the authors' code, for the layout ``'half'``.

    Its bands continue through both halves of the channels, and band n uses coordinate ``n mod 3 k``. If k does not
    divide every section, the two channels of a pair may have different positions; for merged tokens the
    transform is then not a rotation. Text is still rotated as by `MRoPE`.

    Args:
        ids: (3 k, b, s).
        frequencies: (pairs,).
        sections: pairs of time, rows and columns.
        k: number of positions per token.
    """
    widths = torch.tensor(reference_sections(sections, k) * 2)
    coordinate = (torch.arange(len(widths)) % (3 * k)).repeat_interleave(widths)
    halves = (tables(ids, frequencies, half) for half in coordinate.chunk(2))
    return HalvesRotation(*(PairRotation(cos[:, None], sin[:, None], "half") for cos, sin in halves))
