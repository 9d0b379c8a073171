"""Blocks of a token sequence: text runs, images, tiles and videos."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from vispe.errors import ShapeError
from vispe.multimodal.streams.segments import TEXT


@dataclass(frozen=True, eq=False)
class Blocks:
    """Blocks of a stream in order: text runs, images, tiles and videos; every tensor has m entries.

    Attributes:
        sample: row of the batch.
        document: index of the packed sample in the row; each has separate positions.
        group: index of the group that is counted separately by schemes such as `group_pe`.
        kind: 0 text, 1 image, 2 video.
        tokens: number of tokens.
        size: frames, rows and columns of tokens (m, 3); (1, 1, 1) for text.
        seconds: time between frames, float64; NaN if unknown.
        picture: index of the image or video that contains the block, counted through the batch; -1 for text.
        tile: tile row, tile column, rows and columns of tiles (m, 4); row and column are -1 for a thumbnail.
        shared: whether the next block starts at the same position as this block.
        boundary: whether the last token of a block of text ends its segment, such as a sentence.
        parallel: index of the `Parallel` that contains the block, counted through the batch, of its member, attention
            rule and whether members end together (m, 4), -1, -1, -1, 0 outside; None if there are none.
        scale: factor of the coordinates inside each image or video, and of its counter step (m), float64, 1 for
            text; None for 1 everywhere.

    Example:
        >>> from vispe.multimodal import Image, Stream, Text
        >>> blocks = Stream.of([[Text(3), Image(2, 2), Text(1)]]).blocks
        >>> blocks.tokens.tolist(), blocks.visual.tolist(), blocks.first.tolist()
        ([3, 4, 1], [False, True, False], [0, 3, 7])
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
    boundary: Tensor
    parallel: Tensor | None = None
    scale: Tensor | None = None

    @cached_property
    def visual(self) -> Tensor:
        """Whether a block is part of an image or video (m)."""
        return self.kind != TEXT

    @cached_property
    def ends(self) -> Tensor:
        """Whether a block is the last part of its image or video (m)."""
        following = torch.cat([self.picture[1:], self.picture.new_full((1,), -2)])
        return self.visual & (following != self.picture)

    @cached_property
    def part(self) -> Tensor:
        """Index of a block among the consecutive parts of its image or video, from 0 (m); 0 for text."""
        index = torch.arange(len(self.kind), device=self.kind.device)
        return index - torch.where(self._begins, index, 0).cummax(0).values

    @cached_property
    def parts(self) -> Tensor:
        """Number of consecutive parts of the image or video that contains a block (m); 1 for text."""
        run = self._begins.long().cumsum(0) - 1
        return torch.zeros_like(run).index_add_(0, run, torch.ones_like(run))[run]

    @cached_property
    def _begins(self) -> Tensor:
        before = torch.cat([self.picture.new_full((1,), -2), self.picture[:-1]])
        return ~self.visual | (before != self.picture)

    @cached_property
    def text_before(self) -> Tensor:
        """Number of text tokens between a block and the previous image, or the start of its document (m)."""
        text = torch.where(self.visual, 0, self.tokens)
        before = text.cumsum(0) - text
        restarts = torch.ones_like(self.visual)
        same = (self.document[1:] == self.document[:-1]) & (self.sample[1:] == self.sample[:-1])
        restarts[1:] = self.visual[:-1] | ~same
        return before - torch.where(restarts, before, 0).cummax(0).values

    @cached_property
    def first(self) -> Tensor:
        """Index of the first token of a block among all non-padding tokens (m)."""
        return self.tokens.cumsum(0) - self.tokens


def check_same_shape(types: Tensor, **others: Tensor | None) -> None:
    """Raise `ShapeError` unless all tensors have the shape (b, s) of `types`."""
    if types.ndim != 2:
        raise ShapeError(f"types needs the shape (b, s), got {tuple(types.shape)}.")
    for name, other in others.items():
        if other is not None and other.shape != types.shape:
            raise ShapeError(
                f"{name} needs the shape {tuple(types.shape)} of types, got {tuple(other.shape)}."
            )
