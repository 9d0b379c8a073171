"""A batch of token sequences, described block by block: what stands where, without the tokens themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, cast

import torch
from torch import Tensor

from vispe.errors import InputError, OptionError, ShapeError
from vispe.multimodal._typed import unfolded
from vispe.multimodal.segments import IMAGE, TEXT, VIDEO, WHOLE, Image, Segment, Text, Video

Row = Sequence[Segment] | Sequence[Sequence[Segment]]  # a sample, or several packed into one row


@dataclass(frozen=True, eq=False)
class Blocks:
    """The blocks of a stream in order: runs of text, and images, tiles and videos; every tensor has m entries.

    Attributes:
        sample: row of the batch.
        document: number of the packed sample inside the row; each has positions of its own.
        group: see `vispe.multimodal.Text`.
        kind: 0 text, 1 image, 2 video.
        tokens: how many.
        size: frames, rows and columns of tokens (m, 3); (1, 1, 1) for text.
        seconds: from frame to frame, float64; NaN where it is not known.
        picture: number of the image or video that the block is a part of, counted through the batch; -1 for text.
        tile: tile row, tile column, rows and columns of tiles (m, 4); row and column are -1 for a thumbnail.
        shared: whether what follows starts where the block starts.
    """

    sample: Tensor
    document: Tensor
    group: Tensor
    kind: Tensor
    tokens: Tensor
    size: Tensor
    seconds: Tensor
    picture: Tensor
    tile: Tensor
    shared: Tensor

    @cached_property
    def visual(self) -> Tensor:
        """Whether a block is a part of a picture (m)."""
        return self.kind != TEXT

    @cached_property
    def ends(self) -> Tensor:
        """Whether a block is the last part of its picture (m)."""
        following = torch.cat([self.picture[1:], self.picture.new_full((1,), -2)])
        return self.visual & (following != self.picture)

    @cached_property
    def part(self) -> Tensor:
        """Number of a block among the parts of its picture that stand together, from 0 (m); 0 for text."""
        place = torch.arange(len(self.kind), device=self.kind.device)
        return place - torch.where(self._begins, place, 0).cummax(0).values

    @cached_property
    def parts(self) -> Tensor:
        """How many parts of its picture stand together with a block, itself included (m); 1 for text."""
        run = self._begins.long().cumsum(0) - 1
        return torch.zeros_like(run).index_add_(0, run, torch.ones_like(run))[run]

    @cached_property
    def _begins(self) -> Tensor:
        before = torch.cat([self.picture.new_full((1,), -2), self.picture[:-1]])
        return ~self.visual | (before != self.picture)

    @cached_property
    def first(self) -> Tensor:
        """Number of the first token of a block among all tokens that are not padding (m)."""
        return self.tokens.cumsum(0) - self.tokens


@dataclass(frozen=True, eq=False)
class Stream:
    """Token sequences of text, images and videos.

    Attributes:
        blocks: what they are made of.
        mask: (b, s) bool, false where there is padding.
    """

    blocks: Blocks
    mask: Tensor

    @property
    def shape(self) -> torch.Size:
        """Rows and columns of the batch, padding included."""
        return self.mask.shape

    @cached_property
    def lengths(self) -> Tensor:
        """Tokens of each row without padding (b)."""
        return self.mask.sum(1)

    @cached_property
    def block(self) -> Tensor:
        """Block of every token that is not padding (n), row by row."""
        return torch.arange(len(self.blocks.tokens), device=self.mask.device).repeat_interleave(
            self.blocks.tokens
        )

    @cached_property
    def index(self) -> Tensor:
        """Number of every token inside its block (n)."""
        return torch.arange(len(self.block), device=self.mask.device) - self.blocks.first.index_select(
            0, self.block
        )

    @staticmethod
    def of(
        rows: Sequence[Row], padding: Literal["left", "right"] = "right", length: int | None = None
    ) -> Stream:
        """Describe sequences by hand.

        Args:
            rows: for each row of the batch its segments, or a list of several samples that are packed into it.
            padding: where shorter rows are filled up.
            length: of every row; the longest row's by default.

        Raises:
            InputError: there is nothing, or a row is longer than `length`.
        """
        if padding not in ("left", "right"):
            raise OptionError(f"padding is 'left' or 'right', got {padding!r}.")
        table: list[tuple[object, ...]] = []
        totals: list[int] = []
        picture = 0
        for row, samples in enumerate(_documents(r) for r in rows):
            before = sum(int(t[4]) for t in table)  # type: ignore[call-overload]
            for document, segments in enumerate(samples):
                for segment in segments:
                    at = (row, document)
                    if isinstance(segment, Text):
                        table.append(
                            (
                                *at,
                                segment.group,
                                TEXT,
                                segment.tokens,
                                (1, 1, 1),
                                None,
                                -1,
                                WHOLE,
                                segment.shared,
                            )
                        )
                        continue
                    kind, seconds = (VIDEO, segment.seconds) if isinstance(segment, Video) else (IMAGE, None)
                    for t, h, w, tile in segment.parts():
                        table.append((*at, 0, kind, t * h * w, (t, h, w), seconds, picture, tile, False))
                    picture += 1
            totals.append(sum(int(t[4]) for t in table) - before)  # type: ignore[call-overload]
        if not table:
            raise InputError("A stream needs at least one segment; got none.")
        longest = max(totals) if length is None else length
        if longest < max(totals):
            raise InputError(
                f"Row {totals.index(max(totals))} has {max(totals)} tokens, more than length={length}."
            )
        place, counts = torch.arange(longest), torch.tensor(totals)[:, None]
        mask = place >= longest - counts if padding == "left" else place < counts
        return Stream(_table(table), mask)

    @staticmethod
    def from_ids(
        types: Tensor,
        images: Tensor | Sequence[Image] | None = None,
        videos: Tensor | Sequence[Video] | None = None,
        *,
        mask: Tensor | None = None,
        merge: int = 1,
        seconds: Tensor | Sequence[float] | None = None,
        frames_apart: bool = False,
        documents: Tensor | None = None,
        groups: Tensor | None = None,
    ) -> Stream:
        """Describe sequences the way processors give them: a type for each token, and the grids in order.

        Args:
            types: (b, s), 0 text, 1 image, 2 video (`mm_token_type_ids`).
            images: grids (n, 3) of frames, rows, columns, or `Image` for each.
            videos: grids (n, 3), or `Video` for each.
            mask: (b, s), 0 where there is padding (`attention_mask`).
            merge: what rows and columns of grids given as tensors are divided by (`spatial_merge_size`).
            seconds: from frame to frame of each video (`second_per_grid_ts`), for grids given as a tensor.
            frames_apart: text stands between the frames of a video (Qwen3-VL): each is a block of its own.
            documents: (b, s), number of the packed sample that a token belongs to.
            groups: (b, s), see `Text.group`.

        Raises:
            InputError: placeholders and grids do not agree; names the sample and the segment.
            ShapeError: tensors have other shapes.
        """
        from vispe.multimodal.from_ids import stream_from_ids

        return stream_from_ids(types, images, videos, mask, merge, seconds, frames_apart, documents, groups)

    def scatter(self, values: Tensor, padding: float = 0) -> Tensor:
        """Spread values of tokens (..., n) over the batch (..., b, s), `padding` elsewhere."""
        if values.shape[-1] == self.mask.numel():
            return unfolded(values, -1, self.shape)
        out = values.new_full((*values.shape[:-1], self.mask.numel()), padding)
        return unfolded(out.index_copy_(-1, self.mask.flatten().nonzero()[:, 0], values), -1, self.shape)

    def attention_mask(self) -> Tensor:
        """Return which keys a query may attend to, (b, 1, s, s) bool.

        Causal; nothing across packed samples; a shared run is seen by nothing after it but itself. Padding sees
        nothing and is seen by nothing.
        """
        b = self.blocks
        place = self.scatter(torch.arange(len(self.block), device=self.mask.device), -1)
        document = self.scatter(b.document[self.block], -1)
        own = self.scatter(
            torch.where(b.shared, torch.arange(len(b.shared), device=place.device), -1)[self.block], -1
        )

        def q(x: Tensor) -> Tensor:
            return x[:, None, :, None]

        def k(x: Tensor) -> Tensor:
            return x[:, None, None, :]

        seen = (q(place) >= k(place)) & (q(document) == k(document)) & ((k(own) < 0) | (q(own) == k(own)))
        return seen & q(self.mask) & k(self.mask)


def _documents(row: object) -> list[Sequence[Segment]]:
    """Return the samples packed into a row."""
    if isinstance(row, Text | Image | Video) or not isinstance(row, Sequence):
        raise InputError(
            f"A row is a list of segments, got {row!r}; write Stream.of([[Text(5), Image(4, 6)]])."
        )
    items = list(cast("Sequence[object]", row))
    if all(isinstance(i, Text | Image | Video) for i in items):
        return [cast("list[Segment]", items)]
    if any(isinstance(i, Text | Image | Video) for i in items):
        raise InputError("A row holds segments, or lists of segments that are packed into it, not both.")
    for item in items:
        if not isinstance(item, Sequence) or not all(
            isinstance(i, Text | Image | Video) for i in cast("Sequence[object]", item)
        ):
            raise InputError(f"A row holds Text, Image and Video, or lists of them, got {item!r}.")
    return [list(i) for i in cast("list[Sequence[Segment]]", items)]


def _table(rows: list[tuple[object, ...]]) -> Blocks:
    columns = list(zip(*rows, strict=True))
    seconds = torch.tensor([float("nan") if s is None else float(s) for s in columns[6]], dtype=torch.float64)  # type: ignore[arg-type]
    sample, document, group, kind, tokens, size, _, picture, tile, shared = (
        torch.tensor(c) if i != 6 else None for i, c in enumerate(columns)
    )
    return Blocks(sample, document, group, kind, tokens, size, seconds, picture, tile, shared)  # type: ignore[arg-type]


def check_same_shape(types: Tensor, **others: Tensor | None) -> None:
    """Raise `ShapeError` unless all tensors have the shape (b, s) of `types`."""
    if types.ndim != 2:
        raise ShapeError(f"types needs the shape (b, s), got {tuple(types.shape)}.")
    for name, other in others.items():
        if other is not None and other.shape != types.shape:
            raise ShapeError(
                f"{name} needs the shape {tuple(types.shape)} of types, got {tuple(other.shape)}."
            )
