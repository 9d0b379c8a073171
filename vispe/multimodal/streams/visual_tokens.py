"""Tokens of images and videos: frame, row and column of each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from vispe.multimodal.streams.attention_blocks import Blocks


@dataclass(frozen=True, eq=False)
class VisualTokens:
    """Tokens of images and videos, k in total; coordinates in float64.

    Attributes:
        blocks: all blocks of the stream.
        block: block of each token (k).
        index: index of each token in its block (k).

    Example:
        >>> import torch
        >>> from vispe.multimodal import Image, Stream, Text
        >>> stream = Stream.of([[Text(1), Image(2, 2)]])
        >>> visual = stream.blocks.visual[stream.block]
        >>> tokens = VisualTokens(stream.blocks, stream.block[visual], stream.index[visual])
        >>> tokens.row.tolist(), tokens.column.tolist()
        ([0.0, 0.0, 1.0, 1.0], [0.0, 1.0, 0.0, 1.0])
    """

    blocks: Blocks
    block: Tensor
    index: Tensor

    def of(self, values: Tensor) -> Tensor:
        """Return values of blocks (m, ...) for each token (k, ...)."""
        return values.index_select(0, self.block)

    @cached_property
    def _cells(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return frame, row and column; quotients of integers below 2 ** 26 are exact in float64."""
        rows, columns = (self.of(n) for n in self.blocks.size[:, 1:].double().unbind(1))
        index = self.index.double()
        line = (index / columns).floor()
        frame = (line / rows).floor()
        return frame, line - frame * rows, index - line * columns

    @property
    def frame(self) -> Tensor:
        """Frame of each token, counted from 0."""
        return self._cells[0]

    @property
    def row(self) -> Tensor:
        """Row of each token in its frame, counted from 0."""
        return self._cells[1]

    @property
    def column(self) -> Tensor:
        """Column of each token in its frame, counted from 0."""
        return self._cells[2]
