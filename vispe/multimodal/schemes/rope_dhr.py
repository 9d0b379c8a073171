"""RoPE-DHR: tile tokens share the positions of the thumbnail tokens at the same location."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from vispe.errors import UnsupportedCombination
from vispe.multimodal import allocation
from vispe.multimodal.coordinates import Coordinates
from vispe.multimodal.registry import register_scheme
from vispe.multimodal.scheme import Scheme
from vispe.multimodal.streams.attention_blocks import Blocks
from vispe.multimodal.streams.token_stream import Stream
from vispe.multimodal.streams.torch_typing import listed
from vispe.multimodal.streams.visual_tokens import VisualTokens

SHRINK = 1e-6  # the reference shrinks tiles by this fraction


@register_scheme
@dataclass(frozen=True)
class RoPEDHR(Scheme):
    """Positions of an image's thumbnail in raster order, shared by the tiles at the same location (arXiv 2506.06279).

    An image in tiles of h x w tokens, with a thumbnail that also has h x w tokens, uses h w positions for any
    number of tiles:
    token (a, d) of tile (j, i) of Y x X tiles is at the thumbnail's row ``floor((j + (a + 1/2) / h) h / Y)`` and
    column ``floor((i + (d + 1/2) / w) w / X)``. Images without tiles and videos are counted as by `rope1d`. Tokens that
    share a position differ by features and causal order only.

    ID-Align (arXiv 2505.21465) has the same rule: high-resolution tokens share the position of the thumbnail
    token at the same location. Its thumbnail comes first: ``Image(..., thumbnail='first')``. The variant of
    ID-Align for LLaVA-NeXT is not implemented: there, one grid of any size with a token at the end of each
    row replaces the tiles. The rounding of its authors was not compared.

    Args:
        tile_order: order of the tiles in the sequence: ``'row_major'``, the order in which they are cut, or
            ``'column_major'``, the order that the reference assumes.
        sampling: ``'centre'`` for the formula above, or ``'corner'``: evenly spaced positions from one edge
            of a tile to the other, one per token, both edges included, minus one millionth, truncated, as in
            the reference.

    Differs from the reference: in these two defaults; supports any size of tiles and of grids, batches, and
    thumbnails before the tiles.
    """

    name: ClassVar[str] = "rope_dhr"
    summary: ClassVar[str] = "Tiles share the positions of the thumbnail; an image costs one tile (CoMemo)."
    paper: ClassVar[str] = "CoMemo, https://arxiv.org/abs/2506.06279"

    tile_order: Literal["row_major", "column_major"] = "row_major"
    sampling: Literal["centre", "corner"] = "centre"

    @property
    def axes(self) -> int:
        """One axis."""
        return 1

    def counter_step(self, blocks: Blocks, draws: Tensor | None) -> Tensor:
        """Return the number of tokens of one part of each visual segment, as the step of its last part (m).

        Raises:
            UnsupportedCombination: an image is in tiles, but has no thumbnail next to them.
        """
        _check_thumbnails(blocks)
        return torch.where(blocks.ends, blocks.tokens.double(), 0.0)

    def local(self, tokens: VisualTokens, draws: Tensor | None) -> Tensor:
        """Return the index of the thumbnail token at the location of each token (1, k)."""
        blocks = tokens.blocks
        height, width = blocks.size[:, 1].double(), blocks.size[:, 2].double()
        row, column, rows, columns = blocks.tile.unbind(1)
        small = row < 0  # a thumbnail counts as a segment with one tile
        if self.tile_order == "column_major":
            number = row * columns + column
            row, column = number % rows, number // rows
        row, column = (torch.where(small, 0, n).double() for n in (row, column))
        rows, columns = (torch.where(small, 1, n).double() for n in (rows, columns))
        y = self._place(tokens, tokens.row, row, rows, height)
        x = self._place(tokens, tokens.column, column, columns, width)
        return (tokens.frame * tokens.of(height * width) + y * tokens.of(width) + x)[None]

    def _place(
        self, tokens: VisualTokens, token: Tensor, tile: Tensor, tiles: Tensor, side: Tensor
    ) -> Tensor:
        """Return the index of tokens along a side of the thumbnail (k), from that in their tile (k).

        The last three arguments are per block (m). Quotients are accurate enough: non-integers differ by 1 / tiles.
        """
        if self.sampling == "centre":
            return ((token + tokens.of(tile * side + 0.5)) / tokens.of(tiles)).floor()
        edge = side / tiles - SHRINK
        return (tokens.of(edge * tile) + token * tokens.of(edge / (side - 1).clamp(min=1))).floor()

    def allocation(self, pairs: int, kv_heads: int = 1) -> Tensor:
        """Return axis 0 for every pair (pairs,)."""
        return allocation.single(pairs)


def media_ids(stream: Stream, coordinates: Coordinates) -> Tensor:
    """Return the coordinates of visual tokens only, row by row of the batch (axes, k).

    Use them for the keys of cross-attention from text to images.

    Example:
        >>> from vispe.multimodal import Image, Text, create_scheme
        >>> stream = Stream.of([[Text(2), Image(1, 2)]])
        >>> media_ids(stream, create_scheme("mrope").coordinates(stream)).tolist()
        [[2.0, 2.0], [2.0, 2.0], [2.0, 3.0]]
    """
    visual = stream.scatter(stream.blocks.visual[stream.block])
    return coordinates.ids[:, visual]


def _check_thumbnails(blocks: Blocks) -> None:
    """Raise `UnsupportedCombination` if consecutive tiles of an image have no thumbnail."""
    cut = blocks.visual & (blocks.tile[:, 2] * blocks.tile[:, 3] > 1)
    small = cut & (blocks.tile[:, 0] < 0)
    run = (blocks.part == 0).long().cumsum(0) - 1
    counts = torch.zeros_like(run).index_add_(0, run, small.long())[run]
    lonely = cut & (counts == 0)
    if bool(lonely.any()):
        m = int(lonely.nonzero()[0, 0])
        rows, columns = listed(blocks.tile[m, 2:])
        raise UnsupportedCombination(
            f"rope_dhr needs a thumbnail for tiles, but sample {int(blocks.sample[m])} has an image of "
            f"{rows} x {columns} tiles without an adjacent thumbnail. Use Image(..., thumbnail='last'), "
            "or the scheme v2pe."
        )
