"""Counters at the blocks of a stream: sums of counter steps, and where the counter of each row starts and ends."""

from __future__ import annotations

import torch
from torch import Tensor

from vispe.multimodal.streams.attention_blocks import Blocks


def steps_before(blocks: Blocks, step: Tensor) -> Tensor:
    """Return the sum of the steps (m) of the earlier blocks of the same document and group, for each block (m).

    Args:
        blocks: blocks of the stream.
        step: counter step over each block (m), float64.

    Example:
        >>> from vispe.multimodal import Image, Stream, Text
        >>> blocks = Stream.of([[Text(3), Image(2, 2), Text(1)], [Text(2)]]).blocks
        >>> steps_before(blocks, blocks.tokens.double()).tolist()
        [0.0, 3.0, 7.0, 0.0]
    """
    # one number for each combination of row, document and group
    key = (blocks.sample * (blocks.document.max() + 1) + blocks.document) * (
        blocks.group.max() + 1
    ) + blocks.group
    order = key.argsort(stable=True)
    step, key = step[order], key[order]
    before = step.cumsum(0) - step
    new = torch.ones_like(key, dtype=torch.bool)
    new[1:] = key[1:] != key[:-1]
    first = new.nonzero()[:, 0][new.cumsum(0) - 1]
    return torch.empty_like(before).index_copy_(0, order, before - before[first])


def row_starts(blocks: Blocks, start: Tensor) -> Tensor:
    """Return the counters `start` (b) for the blocks of the first document of each row, 0 for other blocks (m)."""
    first = blocks.document.index_select(0, torch.searchsorted(blocks.sample, blocks.sample))
    return torch.where(blocks.document == first, start[blocks.sample], 0.0)


def row_ends(blocks: Blocks, after: Tensor, lengths: Tensor, start: Tensor | None) -> Tensor:
    """Return the counter after the last block of each row (b), float64.

    Args:
        blocks: blocks of the stream.
        after: counter at the end of each block (m).
        lengths: tokens of each row (b); empty rows end where they start.
        start: counter at which each row starts (b); None for 0.
    """
    rows = torch.arange(len(lengths), device=after.device)
    end = torch.searchsorted(blocks.sample, rows, right=True) - 1
    following = after[end.clamp(min=0)]
    return torch.where(lengths == 0, 0.0 if start is None else start.double(), following)
