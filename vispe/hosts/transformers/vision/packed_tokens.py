"""Chunks of a vision tower's packed sequence: groups of tokens that attend to each other, and their positions.

Towers of the Qwen family concatenate the patches of all images and frames of a call and split the sequence into chunks:
a frame, or a window of it. Patches that are merged later are adjacent, so the order is not row-major. Chunks of equal
size on grids of equal shape are processed as one batch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from vispe.encodings.base import Encoding
from vispe.encodings.parts.preparation import prepare
from vispe.errors import ShapeError
from vispe.grid import Grid, Positions
from vispe.hosts.common.context import Context


class ChunkGroup:
    """Chunks of equal size on grids of equal shape.

    Args:
        index: (b, n) int64, indices of their tokens in the sequence; None for all tokens in order.
        count: number of chunks, b.
        context: the positions of their tokens, and the shared encodings.
    """

    __slots__ = ("context", "count", "index")

    def __init__(self, index: Tensor | None, count: int, context: Context) -> None:
        self.index, self.count, self.context = index, count, context

    def gather(self, x: Tensor) -> Tensor:
        """Return the tokens (b, n, ...) of the chunks, from the sequence (tokens, ...)."""
        x = x if self.index is None else x.index_select(0, self.index.flatten().to(x.device))
        return x.unflatten(0, (self.count, -1))


class Chunks:
    """A partition of the sequence of tokens.

    Args:
        groups: groups of chunks; every token is in one of them.
        inverse: (tokens,) int64, index of each token in the concatenated groups; None if the order is the same.
    """

    __slots__ = ("groups", "inverse")

    def __init__(self, groups: Sequence[ChunkGroup], inverse: Tensor | None) -> None:
        self.groups, self.inverse = tuple(groups), inverse

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, x: Tensor, dropout_p: float
    ) -> Tensor:
        """Return attention (tokens, h * d_h) within each chunk.

        Args:
            module: the attention layer.
            q: queries (tokens, h, d_h).
            k: keys of the same shape.
            v: values of the same shape.
            x: input of the layer (tokens, d).
            dropout_p: dropout probability of the attention weights.
        """
        outs: list[Tensor] = []
        for group in self.groups:
            parts = (rearrange(group.gather(t), "b n h d -> b h n d") for t in (q, k, v))
            out = group.context.attend(module, *parts, group.gather(x), dropout_p)
            outs.append(rearrange(out, "b h n d -> (b n) (h d)"))
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        return out if self.inverse is None else out.index_select(0, self.inverse.to(out.device))


class PackedContext:
    """State of one forward pass of a packed tower, for its attention layers; immutable by convention.

    It is passed as a keyword argument, so that recomputation under activation checkpointing uses the same positions.

    Args:
        frames: chunks of the layers with global attention in each frame.
        windows: chunks of the layers with windowed attention; None if there are none.
        global_layers: the layers with global attention, if there are windows.
        rope: whether the tower's own rotary embedding is in use.
    """

    __slots__ = ("frames", "global_layers", "rope", "windows")

    def __init__(
        self, frames: Chunks, windows: Chunks | None, global_layers: Sequence[int], rope: bool
    ) -> None:
        self.frames, self.windows = frames, windows
        self.global_layers, self.rope = frozenset(global_layers), rope

    def chunks(self, layer: int) -> Chunks:
        """Return the chunks of block `layer`."""
        return self.frames if self.windows is None or layer in self.global_layers else self.windows


def seeded_prepare(encodings: Sequence[Encoding], training: bool) -> Callable[[Positions], Positions]:
    """Return the function that prepares positions in one forward pass, with equal random numbers for equal shapes."""
    random = training and any(type(e).prepare is not Encoding.prepare for e in encodings)
    seed = int(torch.randint(2**31, ()).item()) if random else None

    def prepared(pos: Positions) -> Positions:
        generator = None
        if seed is not None:
            generator = torch.Generator(pos.coords.device).manual_seed(seed)
        return prepare(encodings, pos, generator=generator)

    return prepared


def split_chunks(
    ids: Tensor,
    ends: Tensor,
    grids: Sequence[tuple[int, int, int]],
    device: torch.device,
    bound: Callable[[Positions], Any],
    reference: tuple[int, ...] | None = None,
) -> Chunks:
    """Split the sequence of tokens into chunks, grouped by size and grid.

    Args:
        ids: row and column (tokens, 2) of every token in its image, in the order of the sequence.
        ends: (chunks + 1,) cumulative lengths of the chunks, from 0.
        grids: frames, rows and columns of every image or video, in the order of the sequence.
        device: device of the tokens.
        bound: function from the positions of a group to its `Context`.
        reference: grid of the training resolution.

    Raises:
        ShapeError: the ids are not rows and columns of the grids.
    """
    cells = ids.detach().cpu()
    if cells.shape != (sum(t * h * w for t, h, w in grids), 2):
        raise ShapeError(
            f"The position ids of the tower must have one row and column per patch of the grids {list(grids)}, got the "
            f"shape {tuple(ids.shape)}."
        )
    last = list(accumulate(t * h * w for t, h, w in grids))
    starts: dict[tuple[int, int, int], list[int]] = {}
    for start, end in pairwise(ends.tolist()):
        if end > start:
            _, h, w = grids[bisect_right(last, start)]
            starts.setdefault((end - start, h, w), []).append(start)
    groups: list[ChunkGroup] = []
    order: list[Tensor] = []
    for (n, h, w), of_group in starts.items():
        # token indices of the chunks (b, n)
        index = torch.tensor(of_group)[:, None] + torch.arange(n)
        pos = _positions(cells[index], Grid((h, w), reference=reference), device)
        order.append(index.flatten())
        one_group = len(starts) == 1
        groups.append(ChunkGroup(None if one_group else index.to(device), len(of_group), bound(pos)))
    inverse = None if len(groups) == 1 else torch.cat(order).argsort().to(device)
    return Chunks(groups, inverse)


def _positions(cells: Tensor, grid: Grid, device: torch.device) -> Positions:
    """Return the positions of chunks (b, n, 2) on one grid; with a batch axis of 1 if all chunks are equal."""
    integers = cells.long()
    size = torch.tensor(grid.shape)
    if bool(((integers != cells) | (integers < 0) | (integers >= size)).any()):
        raise ShapeError(
            f"The position ids of the tower must be rows and columns of the grid {grid.shape}, got ids outside it."
        )
    if bool((integers == integers[:1]).all()):
        integers = integers[:1]
    index = integers[..., 0] * grid.shape[1] + integers[..., 1]
    with torch.inference_mode(False):
        return grid.positions(device).gather(index.to(device))
