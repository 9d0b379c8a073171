"""`Stream`: a batch of token sequences described block by block, without the tokens themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from vispe.errors import InputError, OptionError, counted
from vispe.multimodal.streams.attention_blocks import Blocks
from vispe.multimodal.streams.parallel_segments import Align, See, apply_set_rules
from vispe.multimodal.streams.processor_ids import blocks_from_ids
from vispe.multimodal.streams.segment_blocks import Row, blocks_from_segments
from vispe.multimodal.streams.segments import Image, Video
from vispe.multimodal.streams.torch_typing import unfolded
from vispe.multimodal.streams.visual_scale import Scale, scaled_blocks


@dataclass(frozen=True, eq=False)
class Stream:
    """Batch of token sequences of text, images and videos.

    Attributes:
        blocks: their blocks.
        mask: (b, s) bool, false for padding.
        coupled: (k, 5), tokens at the position of a cell of an image or video, and the four cells that are averaged, as
            indices among all non-padding tokens; None if there are none.

    Raises:
        OptionError: an argument of `of` or `from_ids` has an invalid value.
        ShapeError: a tensor passed to `from_ids` has the wrong shape.
        InputError: there are no segments, a row is too long, or the grids do not match the token types.

    Example:
        >>> from vispe.multimodal import Image, Text
        >>> stream = Stream.of([[Text(2), Image(2, 2)], [Text(3)]])
        >>> stream.shape, stream.lengths.tolist()
        (torch.Size([2, 6]), [6, 3])
        >>> stream.mask[1].tolist()
        [True, True, True, False, False, False]
    """

    blocks: Blocks
    mask: Tensor
    coupled: Tensor | None = None

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
        """Block index of every non-padding token (n), row by row."""
        tokens = self.blocks.tokens
        return torch.arange(len(tokens), device=self.mask.device).repeat_interleave(tokens)

    @cached_property
    def index(self) -> Tensor:
        """Index of every token in its block (n)."""
        first = self.blocks.first.index_select(0, self.block)
        return torch.arange(len(self.block), device=self.mask.device) - first

    def scaled(self, scale: Scale) -> Stream:
        """Return the stream with scaled positions of images and videos, for every scheme with one counter.

        With a scale d, the coordinates of a visual segment relative to its start, and the counter step over it, are
        multiplied by d; the step of text remains that of the scheme. In `rope1d`, the position after token i is
        ``p[i] + d`` inside images and ``p[i] + 1`` in text (MODIX, arXiv 2604.12537; OMEGA, arXiv 2511.00821).

        Args:
            scale: number; one number per image or video (p), in the order of the batch; or a function of the stream
                that returns either, such as `vispe.multimodal.modix(embeddings)`. A scale of a scaled stream is
                multiplied by the previous one.

        Raises:
            ShapeError: the number of values differs from that of images and videos.
            InputError: a value is not a finite number above 0.

        Example:
            >>> from vispe.multimodal import Image, Text, create_scheme
            >>> stream = Stream.of([[Text(1), Image(2, 2), Text(1)]]).scaled(0.5)
            >>> create_scheme("rope1d").coordinates(stream).ids[0, 0].tolist()
            [0.0, 1.0, 1.5, 2.0, 2.5, 3.0]
        """
        return replace(self, blocks=scaled_blocks(self.blocks, scale(self) if callable(scale) else scale))

    @staticmethod
    def of(
        rows: Sequence[Row], padding: Literal["left", "right"] = "right", length: int | None = None
    ) -> Stream:
        """Create a stream from segments.

        Args:
            rows: segments per row of the batch, or a list of several samples packed into it.
            padding: side of the padding of shorter rows.
            length: length of every row; that of the longest by default.

        Raises:
            InputError: there are no segments, a row is longer than `length`, or a text refers to a missing cell.
            OptionError: `padding` is invalid.
        """
        if padding not in ("left", "right"):
            raise OptionError(f"padding must be 'left' or 'right', got {padding!r}.")
        blocks, totals, coupled = blocks_from_segments(rows)
        longest = max(totals) if length is None else length
        if longest < max(totals):
            raise InputError(
                f"Row {totals.index(max(totals))} has {counted(max(totals), 'token')}, more than length={length}."
            )
        block, counts = torch.arange(longest), torch.tensor(totals)[:, None]
        mask = block >= longest - counts if padding == "left" else block < counts
        return Stream(blocks, mask, coupled)

    @staticmethod
    def from_ids(
        types: Tensor,
        images: Tensor | Sequence[Image] | None = None,
        videos: Tensor | Sequence[Video] | None = None,
        *,
        mask: Tensor | None = None,
        merge: int = 1,
        seconds: Tensor | Sequence[float] | None = None,
        separate_frames: bool = False,
        documents: Tensor | None = None,
        groups: Tensor | None = None,
        boundaries: Tensor | None = None,
        members: Tensor | None = None,
        see: See = "self",
        align: Align = "start",
    ) -> Stream:
        """Create a stream from the output of processors: a type per token, and the grids in order.

        Args:
            types: (b, s), 0 text, 1 image, 2 video (`mm_token_type_ids`).
            images: grids (n, 3) of frames, rows, columns, or a list of `Image`.
            videos: grids (n, 3), or a list of `Video`.
            mask: (b, s), 0 for padding (`attention_mask`).
            merge: divisor of rows and columns of grids passed as tensors (`spatial_merge_size`).
            seconds: time between frames of each video (`second_per_grid_ts`), for grids passed as a tensor.
            separate_frames: whether text separates the frames of a video (Qwen3-VL), so that each is a separate block.
            documents: (b, s), index of the packed sample of each token.
            groups: (b, s), group of each token, from 0 on; counted separately by schemes such as `group_pe`.
            boundaries: (b, s), 1 where a token of text ends its segment, such as a full stop; for schemes that count
                segments (`bilevel`).
            members: (b, s), index of the `Parallel` member of each token, from 0 on, -1 outside; a set is a
                run of member tokens; where the index restarts at 0, another set begins.
            see: attention rule of all sets, see `Parallel`.
            align: alignment of all sets, see `Parallel`.

        Raises:
            InputError: placeholders and grids do not match; the message names the sample and the segment.
            ShapeError: shapes of tensors do not match.
        """
        return Stream(
            *blocks_from_ids(
                types, images, videos, mask, merge, seconds, separate_frames, documents, groups, boundaries, members,
                see, align,
            )
        )  # fmt: skip

    def scatter(self, values: Tensor, padding: float = 0) -> Tensor:
        """Spread values of tokens (..., n) over the batch (..., b, s), `padding` elsewhere."""
        if values.shape[-1] == self.mask.numel():
            return unfolded(values, -1, self.shape)
        out = values.new_full((*values.shape[:-1], self.mask.numel()), padding)
        return unfolded(out.index_copy_(-1, self.mask.flatten().nonzero()[:, 0], values), -1, self.shape)

    def attention_mask(self) -> Tensor:
        """Return the attention mask, (b, 1, s, s) bool, True = attend.

        Causal; no attention across packed samples; only a shared run itself attends to its tokens; members of
        a `Parallel` follow its rules. Padding neither attends nor is attended to.
        """
        return self.block_mask() & self.mask[:, None, :, None] & self.mask[:, None, None, :]

    def block_mask(self) -> Tensor:
        """Return `attention_mask` without the masking of padding."""
        b = self.blocks
        block = self.scatter(torch.arange(len(self.block), device=self.mask.device), -1)
        document = self.scatter(b.document[self.block], -1)
        number = torch.arange(len(b.shared), device=block.device)
        shared_block = self.scatter(torch.where(b.shared, number, -1)[self.block], -1)

        def q(x: Tensor) -> Tensor:
            return x[:, None, :, None]

        def k(x: Tensor) -> Tensor:
            return x[:, None, None, :]

        same_sample = q(document) == k(document)
        visible = (
            (q(block) >= k(block))
            & same_sample
            & ((k(shared_block) < 0) | (q(shared_block) == k(shared_block)))
        )
        if b.parallel is None:
            return visible
        beside = self.scatter(b.parallel[self.block].T, -1)
        return apply_set_rules(visible, same_sample, beside, beside)
