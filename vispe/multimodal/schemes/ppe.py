"""PPE: a merged token keeps the positions of several of the tokens that it was made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from vispe.encodings._options import check_flag, is_whole
from vispe.errors import InputError, OptionError, ShapeError
from vispe.multimodal import allocation
from vispe.multimodal.merging import merge_tokens
from vispe.multimodal.options import check_option, sections_for
from vispe.multimodal.registry import register_scheme
from vispe.multimodal.scheme import Coordinates, VisualTokens
from vispe.multimodal.schemes.mrope import MRoPE, MRoPEInterleaved


@register_scheme
@dataclass(frozen=True)
class PPE(MRoPE):
    """MRoPE with k positions for each token, in parts of the pairs of each axis (arXiv 2510.22936).

    Coordinates are t_1 .. t_k, h_1 .. h_k, w_1 .. w_k. Those of tokens that are not merged are k times the same, so
    text and whole pictures are encoded as by `MRoPE`, and k = 1 is `MRoPE`. `merge` makes tokens that differ.

    Options are those of `MRoPE` and

    Args:
        k: positions of a token, K.
        bands: how the pairs of an axis are shared out: ``'chunked'``, the highest frequencies to the first position
            and so on; ``'interleaved'``, in turn, so that each position has high and low ones; ``'reference'``,
            chunked as the authors' code, which leaves the sections of MRoPE altogether and lets pair i take
            coordinate ``i mod 3 k`` where k does not divide all of them. The first two work with any k.
        axes_in_turn: axes take turns over the frequencies as in `mrope_i`, for models that have them so.
    """

    name: ClassVar[str] = "ppe"
    summary: ClassVar[str] = "MRoPE with the positions of several members for each merged token."
    paper: ClassVar[str] = "Positional Preservation Embedding, https://arxiv.org/abs/2510.22936"

    k: int = 8
    bands: Literal["chunked", "interleaved", "reference"] = "chunked"
    axes_in_turn: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_whole(self.k) or self.k < 1:
            raise OptionError(f"ppe needs k to be a whole number above 0, got {self.k!r}.")
        check_option("bands", self.bands, ("chunked", "interleaved", "reference"))
        check_flag("axes_in_turn", self.axes_in_turn)
        if self.axes_in_turn and self.bands == "reference":
            raise OptionError("bands=reference is for axes in chunks; leave axes_in_turn out, or choose other bands.")

    @property
    def axes(self) -> int:
        """Three for each position."""
        return 3 * self.k

    @property
    def follows(self) -> tuple[bool, ...]:
        """Rows and columns do unless they are reset."""
        return tuple(f for f in super().follows for _ in range(self.k))

    def local(self, tokens: VisualTokens, draws: Tensor | None) -> Tensor:
        """Return frame, row and column, each k times (3 k, k of tokens)."""
        return super().local(tokens, draws).repeat_interleave(self.k, 0)

    def text(self, at: Tensor) -> Tensor:
        """Return the counter on all axes, or on those of time."""
        same = at.expand(self.k, *at.shape)
        others = same if self.text_axes == "all" else torch.zeros_like(same)
        return torch.cat([same, others, others])

    def allocation(self, pairs: int, kv_heads: int = 1) -> Tensor:
        """Return the coordinate of every pair (pairs,)."""
        share = MRoPEInterleaved.share if self.axes_in_turn else self.share
        sections = sections_for(pairs, self.sections, share)
        if self.bands == "reference":
            return allocation.sub_bands(sections, self.k)
        axis = (allocation.interleaved if self.axes_in_turn else allocation.chunked)(sections)
        own = axis[:, None] == torch.arange(3)  # (pairs, 3)
        number = own.long().cumsum(0).gather(1, axis[:, None])[:, 0] - 1  # of the pair among those of its axis
        member = number % self.k if self.bands == "interleaved" else number * self.k // own.sum(0)[axis]
        return axis * self.k + member

    def merge(
        self, coordinates: Coordinates, tokens: Tensor, labels: Tensor, epsilon: float = 0.0
    ) -> tuple[Tensor, Coordinates]:
        """Return merged tokens (b, m, c) and their coordinates; what follows keeps its position.

        Args:
            coordinates: of the tokens before they are merged, by this scheme.
            tokens: (b, s, c).
            labels: (b, s), place of each token's merged token; text and what is not merged has labels of its own,
                and padding is below 0. See `vispe.multimodal.merging.merge_tokens`, also for merging in stages.
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
