"""MouSi: positions shared by all tokens of an image, or by those of a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from vispe.multimodal import allocation
from vispe.multimodal.registry import register_scheme
from vispe.multimodal.scheme import Scheme
from vispe.multimodal.streams.attention_blocks import Blocks
from vispe.multimodal.streams.visual_tokens import VisualTokens


@register_scheme
@dataclass(frozen=True)
class Mousi(Scheme):
    """Share positions among tokens of an image, to use fewer positions (arXiv 2401.17221).

    Args:
        share: ``'all'``: one position for an image with all its tiles, or for a frame; its tokens are only
            distinguished by features and causal order. ``'row'``: one position for each row of an image, a
            tile or a frame.

    The paper's third form, with a learned embedding of columns, is not implemented. There is no reference code.
    """

    name: ClassVar[str] = "mousi"
    summary: ClassVar[str] = "One position per image, or per row of an image."
    paper: ClassVar[str] = "MouSi, https://arxiv.org/abs/2401.17221"

    share: Literal["all", "row"] = "row"

    @property
    def axes(self) -> int:
        """One axis."""
        return 1

    def counter_step(self, blocks: Blocks, draws: Tensor | None) -> Tensor:
        """Return the number of positions of each block (m)."""
        t, h, _ = blocks.size.double().unbind(1)
        return t * h if self.share == "row" else torch.where(blocks.ends, t, 0.0)

    def local(self, tokens: VisualTokens, draws: Tensor | None) -> Tensor:
        """Return the frame of each token, or its row counted through all frames (1, k)."""
        rows = tokens.of(tokens.blocks.size[:, 1])
        return (tokens.frame * rows + tokens.row if self.share == "row" else tokens.frame)[None]

    def allocation(self, pairs: int, kv_heads: int = 1) -> Tensor:
        """Return axis 0 for every pair (pairs,)."""
        return allocation.single(pairs)
