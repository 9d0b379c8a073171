"""VRoPE: four mirrored diagonals per frame, so that attention decay favours no corner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vispe.errors import OptionError
from vispe.multimodal import allocation
from vispe.multimodal.registry import register_scheme
from vispe.multimodal.scheme import Scheme
from vispe.multimodal.streams.attention_blocks import Blocks
from vispe.multimodal.streams.visual_tokens import VisualTokens
from vispe.utils.options import PositiveFloat


@register_scheme
@dataclass(frozen=True)
class VRoPE(Scheme):
    """Positions of every frame along its four diagonals, assigned cyclically to pairs of channels (arXiv 2502.11664).

    A frame of h x w tokens that starts at c has, in row y and column x,

        c + y + x,   c + y + (w-1-x),   c + (h-1-y) + x,   c + (h-1-y) + (w-1-x)

    on the four axes; their mean is the same for all its tokens. Pair i of channels has axis ``i mod 4``, even
    if the number of pairs is not a multiple of 4. A frame uses h + w - 1 positions; the next frame, or text,
    follows without a gap.

    Args:
        stride: positions between frames; h + w - 1 by default. With the default, long videos of large frames
            soon exceed the trained length; with a smaller stride, the positions of frames overlap.

    Differs from the reference: supports batches, and has no state between calls. The reference also has an
    index for time pairs, which its constructor disables.
    """

    name: ClassVar[str] = "vrope"
    summary: ClassVar[str] = "Four mirrored diagonals per frame, interleaved over all frequencies."
    paper: ClassVar[str] = "VRoPE, https://arxiv.org/abs/2502.11664"

    stride: PositiveFloat | None = None

    @property
    def axes(self) -> int:
        """Four axes: unmirrored, mirrored in columns, in rows, in both."""
        return 4

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Directions of the diagonals."""
        return "down right", "down left", "up right", "up left"

    def counter_step(self, blocks: Blocks, draws: Tensor | None) -> Tensor:
        """Return one more than the largest position inside each block (m)."""
        t, h, w = blocks.size.double().unbind(1)
        return (t - 1) * self._frames(h, w) + h + w - 1

    def local(self, tokens: VisualTokens, draws: Tensor | None) -> Tensor:
        """Return the four diagonals (4, k)."""
        _, h, w = tokens.blocks.size.double().unbind(1)
        frame = tokens.frame * tokens.of(self._frames(h, w))
        down, up = tokens.row + tokens.column, tokens.row - tokens.column
        diagonals = (
            frame + down,
            frame + up + tokens.of(w - 1),
            frame - up + tokens.of(h - 1),
            frame - down + tokens.of(h + w - 2),
        )
        return torch.stack(diagonals)

    def _frames(self, h: Tensor, w: Tensor) -> Tensor:
        """Return the number of positions between frames of each block (m)."""
        return h + w - 1 if self.stride is None else torch.full_like(h, self.stride)

    def allocation(self, pairs: int, kv_heads: int = 1) -> Tensor:
        """Return the four axes cyclically (pairs,).

        Raises:
            OptionError: there are fewer than four pairs of channels.
        """
        if pairs < 4:
            raise OptionError(
                f"vrope needs at least 4 pairs of channels for its 4 axes, got {pairs} per head."
            )
        return allocation.cycle(range(4), pairs)
