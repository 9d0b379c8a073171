"""Group position encoding: every group of tokens has a counter of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from vispe.errors import UnsupportedCombination
from vispe.multimodal.registry import register_scheme
from vispe.multimodal.schemes.mrope import RoPE1D
from vispe.multimodal.streams.attention_blocks import Blocks
from vispe.options import Limits, NotNegative


@register_scheme
@dataclass(frozen=True)
class GroupPE(RoPE1D):
    """Count the tokens of each group in a line of their own (arXiv 2505.16983).

    What arrives later in one group does not move the other: a source may grow while its translation is written, and
    cached keys stay right. Groups are those of `Text.group`; positions then do not say which token came first, so
    attention needs a mask, such as `vispe.multimodal.streams.simultaneous_translation` makes. Pictures are counted as by `rope1d`.

    Args:
        phi: where the counters of groups 1, 2, ... start; a number for all of them, or one for each. That of group 0
            starts at 0.
    """

    name: ClassVar[str] = "group_pe"
    summary: ClassVar[str] = "A counter for each group, such as source and target of streaming translation."
    paper: ClassVar[str] = "LLM as Effective Streaming Processor, https://arxiv.org/abs/2505.16983"

    phi: NotNegative | Annotated[tuple[NotNegative, ...], Limits(least=1)] = 0.0

    def starts(self, blocks: Blocks) -> Tensor:
        """Return where the counter of each block's group starts (m).

        Raises:
            UnsupportedCombination: `phi` has fewer numbers than there are groups after the first.
        """
        if not isinstance(self.phi, tuple):
            return (blocks.group > 0).double() * self.phi
        largest = int(blocks.group.max())
        if largest > len(self.phi):
            raise UnsupportedCombination(
                f"phi={list(self.phi)} says where {len(self.phi)} groups after the first start, but the stream has a "
                f"group {largest}; give {largest} numbers, or one for all."
            )
        starts = torch.tensor((0.0, *self.phi), dtype=torch.float64, device=blocks.group.device)
        return starts[blocks.group]
