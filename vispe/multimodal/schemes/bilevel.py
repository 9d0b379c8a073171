"""Bilevel positions: the number of a segment, and the place inside it (BiPE, CONFLATOR)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from vispe.errors import OptionError, ShapeError, UnsupportedCombination
from vispe.multimodal import allocation
from vispe.multimodal.registry import register_scheme
from vispe.multimodal.scheme import Scheme, VisualTokens
from vispe.multimodal.sections import Sections, sections_for
from vispe.multimodal.streams.attention_blocks import Blocks
from vispe.options import Whole

ROOM = (
    2.0**26
)  # places of a segment that the counter has room for; a power of two, so that both parts stay exact


@register_scheme
@dataclass(frozen=True)
class Bilevel(Scheme):
    """Count segments, and start anew inside each of them (arXiv 2401.16421).

    inter = segments before the token, intra = place in its segment, at most train_length - 1.

    Every image, tile and frame is a segment whose places are rows and columns. Text is one segment up to the next
    picture, or, where the stream says which tokens end one (`Text.boundary`, ``Stream.from_ids(boundaries=...)``),
    one for each sentence; the token that ends a segment belongs to it. Axes are inter, row and column; text has its
    place on both of the latter.

    The counter holds both numbers: segment times 2 ** 26 plus place; `split` and `join` go from one to the other.

    Args:
        rotate: axes that turn channels. ``'inter'`` is the paper's (BiPE-RoPE): the place is left to a table added to
            the tokens, which reads ``ids[1:]``. ``'intra'`` turns all channels by the place alone, which starts anew
            at every boundary (CONFLATOR, with boundaries where the language changes). ``'both'`` does without a table.
        sections: with ``rotate='both'``, pairs of channels of inter, rows and columns; by default 24, 20, 20 of 64.
        train_length: places that the table has, or that the model was trained with; later places are the last one.
    """

    name: ClassVar[str] = "bilevel"
    summary: ClassVar[str] = "The number of the segment and the place inside it, for sentences and pictures."
    paper: ClassVar[str] = (
        "Two Stones Hit One Bird: Bilevel Positional Encoding, https://arxiv.org/abs/2401.16421"
    )
    text_exact: ClassVar[bool] = False
    leads: ClassVar[str] = "segment"
    levels: ClassVar[int] = 2

    rotate: Literal["both", "inter", "intra"] = "both"
    sections: Sections = None
    train_length: Whole = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sections is not None and self.rotate != "both":
            raise OptionError(
                f"sections={list(self.sections)} share the channels out, but rotate={self.rotate!r} leaves nothing to "
                "share; say rotate='both'."
            )

    @property
    def follows(self) -> tuple[bool, ...]:
        """Segments do; rows and columns of every picture are counted from 0."""
        return True, False, False

    @property
    def added(self) -> tuple[int, ...]:
        """Rows and columns with ``rotate='inter'``."""
        return (1, 2) if self.rotate == "inter" else ()

    def split(self, counter: Tensor) -> tuple[Tensor, Tensor]:
        """Return the number of the segment and the place in it, which is not clipped, of counters (...)."""
        segment = (counter / ROOM).floor()
        return segment, counter - segment * ROOM

    def join(self, segment: Tensor, place: Tensor) -> Tensor:
        """Return the counters (...) of segments and places, float64; the reverse of `split`."""
        return segment.double() * ROOM + place.double()

    def text(self, at: Tensor) -> Tensor:
        """Return segment, place and place (3, ...) at a counter (...)."""
        segment, place = self.split(at)
        place = self._clipped(place)
        return torch.stack([segment, place, place])

    def counter(self, ids: Tensor) -> Tensor:
        """Return the counter (...) at which text has the coordinates (3, ...)."""
        return self.join(ids[0], ids[1])

    def local(self, tokens: VisualTokens, draws: Tensor | None) -> Tensor:
        """Return frame, row and column (3, k)."""
        return torch.stack([tokens.frame, self._clipped(tokens.row), self._clipped(tokens.column)])

    def moved(self, local: Tensor, at: Tensor) -> Tensor:
        """Return the coordinates (3, k) of tokens of pictures whose blocks start at counters (k)."""
        return local + self.text(at)

    def counters(
        self, blocks: Blocks, draws: Tensor | None, start: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the counter at the start and at the end of each block (m).

        A picture starts a segment of its own: where text is open before it, that is ended.
        """
        self.starts(blocks)
        if blocks.parallel is not None:
            raise UnsupportedCombination(
                "bilevel numbers segments in their order, so none can stand side by side; take another scheme for "
                "Parallel, such as mrope."
            )
        # blocks of a document side by side, and where each document begins
        key = blocks.sample * (blocks.document.max() + 1) + blocks.document
        order = key.argsort(stable=True)
        key, number = key[order], torch.arange(len(key), device=key.device)
        new = torch.ones_like(key, dtype=torch.bool)
        new[1:] = key[1:] != key[:-1]
        first = torch.where(new, number, 0).cummax(0).values
        begin_segment, begin_place = self.split(self._begin(blocks, start)[order])
        visual, shared = blocks.visual[order], blocks.shared[order]
        frames, tokens = blocks.size[order, 0].double(), blocks.tokens[order].double()
        # a place is the text since the last block that ended its segment, or since the document began
        ends = (visual | blocks.boundary[order]) & ~shared
        grown = torch.where(visual | shared, 0.0, tokens)
        before = grown.cumsum(0) - grown
        reset = torch.where(ends, number + 1, 0).cummax(0).values.roll(1)
        reset[0] = 0
        since = torch.maximum(reset, first)
        place = before - before[since] + torch.where(since == first, begin_place, 0.0)
        # segments: one for every frame and every boundary, and one for the text that a picture cuts off
        cut = (visual & (place > 0)).double()
        done = torch.where(visual, cut + frames, ends.double())
        past = done.cumsum(0) - done
        segment = begin_segment + past - past[first]
        at = self.join(segment + cut, torch.where(visual, 0.0, place))
        after = torch.where(ends, self.join(segment + done, torch.zeros_like(place)), at + grown)
        at, after = (torch.empty_like(x).index_copy_(0, order, x) for x in (at, after))
        return at, after, None

    def follow(self, counter: Tensor, boundaries: Tensor) -> tuple[Tensor, Tensor]:
        """Return the coordinates of tokens that are written after a prompt, and the counter after them.

        ``Coordinates.decode`` is the same for tokens of which none ends a segment.

        Args:
            counter: `Coordinates.next` of the prompt (b), or what this returned for the tokens before.
            boundaries: (b, n) bool, whether a token ends its segment.

        Returns:
            ids (3, b, n) and the counter (b).

        Raises:
            ShapeError: there is not one row of boundaries for each counter.
        """
        if boundaries.ndim != 2 or counter.shape != boundaries.shape[:1]:
            raise ShapeError(
                f"boundaries needs the shape ({len(counter)}, n) beside {len(counter)} counters, got "
                f"{tuple(boundaries.shape)}."
            )
        begin, place = (x[:, None] for x in self.split(counter))
        ended = boundaries.long().cumsum(1)
        number = torch.arange(boundaries.shape[1] + 1, device=boundaries.device)
        # of n + 1 tokens: those written, and the one after them
        before = torch.cat([torch.zeros_like(ended[:, :1]), ended], 1)
        reset = torch.where(boundaries, number[1:], 0).cummax(1).values
        reset = torch.cat([torch.zeros_like(reset[:, :1]), reset], 1)
        at = self.join(begin + before, number - reset + torch.where(before == 0, place, 0.0))
        return self.text(at[:, :-1]), at[:, -1]

    def allocation(self, pairs: int, kv_heads: int = 1) -> Tensor:
        """Return the axis of each pair of channels (pairs,)."""
        if self.rotate == "inter":
            return allocation.single(pairs)
        if self.rotate == "intra":
            return allocation.cycle((allocation.H, allocation.W), pairs)
        return allocation.interleaved(sections_for(pairs, self.sections, 20 / 64))

    def _clipped(self, place: Tensor) -> Tensor:
        return place.clamp(max=self.train_length - 1)

    def _begin(self, blocks: Blocks, start: Tensor | None) -> Tensor:
        """Return the counter at the start of each block's document (m); the first of a row goes on from `start`."""
        zero = torch.zeros_like(blocks.sample, dtype=torch.float64)
        if start is None:
            return zero
        first = blocks.document[torch.searchsorted(blocks.sample, blocks.sample)]
        return torch.where(blocks.document == first, start.to(zero)[blocks.sample], zero)
