"""Which tokens of a packed vision tower attend to each other, and where they are.

Towers of the Qwen family lay the patches of all images and frames of a call one after another and cut that line into
chunks: a frame, or a window of it. Patches that are merged later lie side by side, so the order is not that of rows.
Chunks of one size on grids of one size are attended to together, as a batch.
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


class Group:
    """Chunks of one size on grids of one size.

    Args:
        index: (b, n) int64, which tokens of the line they are; None when they are all, in order.
        rows: chunks, b.
        context: the positions of their tokens, and the shared encodings.
    """

    __slots__ = ("context", "index", "rows")

    def __init__(self, index: Tensor | None, rows: int, context: Context) -> None:
        self.index, self.rows, self.context = index, rows, context

    def take(self, x: Tensor) -> Tensor:
        """Return the tokens (b, n, ...) of the line (tokens, ...)."""
        x = x if self.index is None else x.index_select(0, self.index.flatten())
        return x.unflatten(0, (self.rows, -1))


class Chunks:
    """One way to cut the line of tokens.

    Args:
        groups: every token is in one of them.
        back: (tokens,) int64, where each token is among those of the groups; None when they are in order.
    """

    __slots__ = ("back", "groups")

    def __init__(self, groups: Sequence[Group], back: Tensor | None) -> None:
        self.groups, self.back = tuple(groups), back

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, x: Tensor, dropout_p: float
    ) -> Tensor:
        """Return attention (tokens, h * d_h) inside each chunk.

        Args:
            module: the attention layer.
            q: queries (tokens, h, d_h).
            k: keys of the same shape.
            v: values of the same shape.
            x: input of the layer (tokens, d).
            dropout_p: dropout of the attention weights.
        """
        outs: list[Tensor] = []
        for group in self.groups:
            parts = (rearrange(group.take(t), "b n h d -> b h n d") for t in (q, k, v))
            out = group.context.attend(module, *parts, group.take(x), dropout_p)
            outs.append(rearrange(out, "b h n d -> (b n) (h d)"))
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        return out if self.back is None else out.index_select(0, self.back)


class PackedContext:
    """One forward pass of a packed tower, as its attention layers see it; never changed.

    It travels as a keyword argument, so recomputation under checkpointing sees what the first pass saw.

    Args:
        whole: chunks of the layers that see whole frames.
        windows: those of the layers that see windows; None when no layer does.
        seeing_all: the layers that see whole frames, if there are windows.
        rope: whether the tower's own rotary embedding is in use.
    """

    __slots__ = ("rope", "seeing_all", "whole", "windows")

    def __init__(self, whole: Chunks, windows: Chunks | None, seeing_all: Sequence[int], rope: bool) -> None:
        self.whole, self.windows = whole, windows
        self.seeing_all, self.rope = frozenset(seeing_all), rope

    def chunks(self, layer: int) -> Chunks:
        """Return the chunks of block `layer`."""
        return self.whole if self.windows is None or layer in self.seeing_all else self.windows


def prepared_alike(encodings: Sequence[Encoding], training: bool) -> Callable[[Positions], Positions]:
    """Return what prepares positions for one forward pass, with the same draws wherever shapes are the same."""
    drawing = training and any(type(e).prepare is not Encoding.prepare for e in encodings)
    seed = int(torch.randint(2**31, ()).item()) if drawing else None

    def prepared(pos: Positions) -> Positions:
        generator = None
        if seed is not None:
            generator = torch.Generator(pos.coords.device).manual_seed(seed)
        return prepare(encodings, pos, generator=generator)

    return prepared


def chunks_of(
    ids: Tensor,
    ends: Tensor,
    grids: Sequence[tuple[int, int, int]],
    device: torch.device,
    bound: Callable[[Positions], Any],
    reference: tuple[int, ...] | None = None,
) -> Chunks:
    """Cut the line of tokens.

    Args:
        ids: row and column (tokens, 2) of every token in its image, in the order of the line.
        ends: (chunks + 1,) where chunks end, from 0.
        grids: frames, rows and columns of every image or video, in the order of the line.
        device: where the tokens are.
        bound: makes the `Context` of a group from its positions.
        reference: grid of the training resolution.

    Raises:
        ShapeError: the ids are not rows and columns of the grids.
    """
    cells = ids.detach().cpu()
    if cells.shape != (sum(t * h * w for t, h, w in grids), 2):
        raise ShapeError(
            f"The tower got position ids {tuple(ids.shape)} for grids {list(grids)}; give one row and column for each "
            "patch."
        )
    last = list(accumulate(t * h * w for t, h, w in grids))
    starts: dict[tuple[int, int, int], list[int]] = {}
    for start, end in pairwise(ends.tolist()):
        if end > start:
            _, h, w = grids[bisect_right(last, start)]
            starts.setdefault((end - start, h, w), []).append(start)
    groups: list[Group] = []
    order: list[Tensor] = []
    for (n, h, w), at in starts.items():
        index = torch.tensor(at)[:, None] + torch.arange(n)
        pos = _positions(cells[index], Grid((h, w), reference=reference), device)
        order.append(index.flatten())
        one_group = len(starts) == 1
        groups.append(Group(None if one_group else index.to(device), len(at), bound(pos)))
    back = None if len(groups) == 1 else torch.cat(order).argsort().to(device)
    return Chunks(groups, back)


def _positions(cells: Tensor, grid: Grid, device: torch.device) -> Positions:
    """Return the positions of chunks (b, n, 2) of one grid; one row where all chunks are alike."""
    whole = cells.long()
    size = torch.tensor(grid.shape)
    if bool(((whole != cells) | (whole < 0) | (whole >= size)).any()):
        raise ShapeError(
            f"The tower got position ids outside of the rows and columns of a grid of {grid.shape}; give those of the "
            "patches."
        )
    if bool((whole == whole[:1]).all()):
        whole = whole[:1]
    index = whole[..., 0] * grid.shape[1] + whole[..., 1]
    with torch.inference_mode(False):
        return grid.positions(device).gather(index.to(device))
