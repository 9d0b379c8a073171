"""Bilevel positions: segment index and position within the segment (BiPE, CONFLATOR)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from vispe.errors import OptionError, ShapeError, UnsupportedCombination, counted
from vispe.multimodal import allocation
from vispe.multimodal.registry import register_scheme
from vispe.multimodal.scheme import Scheme
from vispe.multimodal.sections import Sections, sections_for
from vispe.multimodal.streams.attention_blocks import Blocks
from vispe.multimodal.streams.visual_tokens import VisualTokens
from vispe.utils.options import PositiveInt

ROOM = 2.0**26  # maximum number of positions per segment; a power of two, so that both parts are exact


@register_scheme
@dataclass(frozen=True)
class Bilevel(Scheme):
    """Count segments, and restart positions within each of them (arXiv 2401.16421).

    inter = number of segments before the token's segment, intra = position in its segment, at most
    train_length - 1.

    Every image, tile and frame is a segment whose positions are rows and columns. Text is one segment up to the next
    visual segment, or, if the stream marks boundaries (`Text.boundary`, ``Stream.from_ids(boundaries=...)``),
    one per sentence; the token that ends a segment belongs to it. Axes are inter, row and column; text has
    its position within the segment on both the row and the column axis.

    The counter contains both numbers: segment times 2 ** 26 plus position; `split` and `join` convert between them.

    Args:
        rotate: axes that rotate channels. ``'inter'`` is BiPE-RoPE, as in the paper: a table added to the
            tokens, indexed by ``ids[1:]``, encodes the position within the segment. ``'intra'`` rotates all
            channels by the position within the segment, which restarts at every boundary (CONFLATOR, with
            boundaries at changes of language). ``'both'`` needs no table.
        sections: with ``rotate='both'``, pairs of channels of inter, rows and columns; by default 24, 20, 20 of 64.
        train_length: number of positions of the table, or of segments in training; later positions are
            clamped to the last one.
    """

    name: ClassVar[str] = "bilevel"
    summary: ClassVar[str] = "Segment index and position within the segment, for sentences and images."
    paper: ClassVar[str] = (
        "Two Stones Hit One Bird: Bilevel Positional Encoding, https://arxiv.org/abs/2401.16421"
    )
    text_exact: ClassVar[bool] = False
    first_axis: ClassVar[str] = "segment"
    levels: ClassVar[int] = 2

    rotate: Literal["both", "inter", "intra"] = "both"
    sections: Sections = None
    train_length: PositiveInt = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sections is not None and self.rotate != "both":
            raise OptionError(
                f"sections={list(self.sections)} have no effect with rotate={self.rotate!r}. Use rotate='both'."
            )

    @property
    def follows_text(self) -> tuple[bool, ...]:
        """True for segments; rows and columns of every image are counted from 0."""
        return True, False, False

    @property
    def added(self) -> tuple[int, ...]:
        """Rows and columns with ``rotate='inter'``."""
        return (1, 2) if self.rotate == "inter" else ()

    def split(self, counter: Tensor) -> tuple[Tensor, Tensor]:
        """Return the segment index and the unclipped position within the segment, of counters (...)."""
        segment = (counter / ROOM).floor()
        return segment, counter - segment * ROOM

    def join(self, segment: Tensor, place: Tensor) -> Tensor:
        """Return the counters (...) of segments and positions, float64; the inverse of `split`."""
        return segment.double() * ROOM + place.double()

    def text(self, at: Tensor) -> Tensor:
        """Return segment, position and position (3, ...) at a counter (...)."""
        segment, place = self.split(at)
        place = self._clipped(place)
        return torch.stack([segment, place, place])

    def counter(self, ids: Tensor) -> Tensor:
        """Return the counter (...) at which text has the coordinates (3, ...)."""
        return self.join(ids[0], ids[1])

    def local(self, tokens: VisualTokens, draws: Tensor | None) -> Tensor:
        """Return frame, row and column (3, k)."""
        return torch.stack([tokens.frame, self._clipped(tokens.row), self._clipped(tokens.column)])

    def moved(self, local: Tensor, at: Tensor, tokens: VisualTokens) -> Tensor:
        """Return the coordinates (3, k) of tokens of visual segments whose blocks start at counters (k)."""
        return local + self.text(at)

    def counters(
        self, blocks: Blocks, draws: Tensor | None, start: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the counter at the start and at the end of each block (m).

        An image starts a new segment and ends an open text segment before it.
        """
        self.starts(blocks)
        if blocks.parallel is not None:
            raise UnsupportedCombination(
                "bilevel numbers segments in order and does not support Parallel. Use another scheme, such as mrope."
            )
        if blocks.scale is not None:
            raise UnsupportedCombination(
                "bilevel numbers segments by integers and does not support Stream.scaled. Use another scheme, such as "
                "mrope."
            )
        # sort blocks by document, and find the start of each document
        key = blocks.sample * (blocks.document.max() + 1) + blocks.document
        order = key.argsort(stable=True)
        key, number = key[order], torch.arange(len(key), device=key.device)
        new = torch.ones_like(key, dtype=torch.bool)
        new[1:] = key[1:] != key[:-1]
        first = torch.where(new, number, 0).cummax(0).values
        begin_segment, begin_place = self.split(self._begin(blocks, start)[order])
        visual, shared = blocks.visual[order], blocks.shared[order]
        frames, tokens = blocks.size[order, 0].double(), blocks.tokens[order].double()
        # the position counts text tokens since the last segment end or document start
        ends = (visual | blocks.boundary[order]) & ~shared
        grown = torch.where(visual | shared, 0.0, tokens)
        before = grown.cumsum(0) - grown
        reset = torch.where(ends, number + 1, 0).cummax(0).values.roll(1)
        reset[0] = 0
        since = torch.maximum(reset, first)
        place = before - before[since] + torch.where(since == first, begin_place, 0.0)
        # segments: one per frame and boundary, and one for text interrupted by an image
        cut = (visual & (place > 0)).double()
        done = torch.where(visual, cut + frames, ends.double())
        past = done.cumsum(0) - done
        segment = begin_segment + past - past[first]
        at = self.join(segment + cut, torch.where(visual, 0.0, place))
        after = torch.where(ends, self.join(segment + done, torch.zeros_like(place)), at + grown)
        at, after = (torch.empty_like(x).index_copy_(0, order, x) for x in (at, after))
        return at, after, None

    def follow(self, counter: Tensor, boundaries: Tensor) -> tuple[Tensor, Tensor]:
        """Return the coordinates of tokens generated after a prompt, and the counter after them.

        The result equals that of ``Coordinates.decode`` if no token ends a segment.

        Args:
            counter: `Coordinates.next` of the prompt (b), or the counter returned for the previous tokens.
            boundaries: (b, n) bool, whether a token ends its segment.

        Returns:
            ids (3, b, n) and the counter (b).

        Raises:
            ShapeError: the numbers of rows of boundaries and counters differ.
        """
        if boundaries.ndim != 2 or counter.shape != boundaries.shape[:1]:
            raise ShapeError(
                f"boundaries needs the shape ({len(counter)}, n) for {counted(len(counter), 'counter')}, got "
                f"{tuple(boundaries.shape)}."
            )
        begin, place = (x[:, None] for x in self.split(counter))
        ended = boundaries.long().cumsum(1)
        number = torch.arange(boundaries.shape[1] + 1, device=boundaries.device)
        # n + 1 tokens: the generated ones and the next
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
        """Return the counter at the start of each block's document (m); the first of a row continues from `start`."""
        zero = torch.zeros_like(blocks.sample, dtype=torch.float64)
        if start is None:
            return zero
        first = blocks.document[torch.searchsorted(blocks.sample, blocks.sample)]
        return torch.where(blocks.document == first, start.to(zero)[blocks.sample], zero)
