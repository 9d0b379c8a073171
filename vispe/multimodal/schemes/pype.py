"""PyPE: image positions in concentric rings from the border to the centre."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vispe.multimodal import allocation
from vispe.multimodal.registry import register_scheme
from vispe.multimodal.scheme import Scheme
from vispe.multimodal.streams.attention_blocks import Blocks
from vispe.multimodal.streams.visual_tokens import VisualTokens
from vispe.utils.options import PositiveInt


@register_scheme
@dataclass(frozen=True)
class PyPE(Scheme):
    """Concentric rings from the border of an image to its centre, with one position per ring (arXiv 2501.10967).

    In an image of h x w tokens that starts at c, row y and column x have

        c + min(y, x, h-1-y, w-1-x, rings-1)

    and the text after it continues one step after the innermost ring. Frames of a video and tiles are counted
    like consecutive images. Positions within a ring are only distinguished by features and causal order.

    In the paper, the central region grows with depth, so that late layers have coarser images:
    `vispe.multimodal.pyramid` assigns numbers of rings to layers.

    Args:
        rings: maximum number of positions of an image; all tokens inside the last ring share its position.
            The default is the number of rings that fit, ``ceil(min(h, w) / 2)``.

    Not compared with the authors' code: implemented from the paper's description, with frames, tiles and text
    after an image as described in this docstring.

    Example:
        >>> from vispe.multimodal import Image, Stream, Text, create_scheme
        >>> stream = Stream.of([[Text(1), Image(3, 4), Text(1)]])
        >>> create_scheme("pype").coordinates(stream).ids[0, 0, 1:-1].view(3, 4).long().tolist()
        [[1, 1, 1, 1], [1, 2, 2, 1], [1, 1, 1, 1]]
    """

    name: ClassVar[str] = "pype"
    summary: ClassVar[str] = "Rings from the border of an image to its centre, one position each."
    paper: ClassVar[str] = "Pyramid-descent Visual Position Encoding, https://arxiv.org/abs/2501.10967"

    rings: PositiveInt | None = None

    @property
    def axes(self) -> int:
        """One axis."""
        return 1

    def counter_step(self, blocks: Blocks, draws: Tensor | None) -> Tensor:
        """Return the total number of rings of the frames of each block (m)."""
        return blocks.size[:, 0].double() * self._rings(blocks)

    def local(self, tokens: VisualTokens, draws: Tensor | None) -> Tensor:
        """Return the ring of each token, counted through all frames (1, k)."""
        h, w = (tokens.of(side) for side in tokens.blocks.size[:, 1:].double().unbind(1))
        rings = tokens.of(self._rings(tokens.blocks))
        # distance to the nearest side, at most the last ring
        down = torch.minimum(tokens.row, h - 1 - tokens.row)
        across = torch.minimum(tokens.column, w - 1 - tokens.column)
        ring = torch.minimum(torch.minimum(down, across), rings - 1)
        return (tokens.frame * rings + ring)[None]

    def _rings(self, blocks: Blocks) -> Tensor:
        """Return the rings of one frame of each block (m)."""
        fit = (blocks.size[:, 1:].amin(1).double() / 2).ceil()
        return fit if self.rings is None else fit.clamp(max=self.rings)

    def allocation(self, pairs: int, kv_heads: int = 1) -> Tensor:
        """Return axis 0 for every pair (pairs,)."""
        return allocation.single(pairs)
