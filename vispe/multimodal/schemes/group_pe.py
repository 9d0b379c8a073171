"""Group position encoding: a separate counter per group of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from vispe.errors import UnsupportedCombination, counted
from vispe.multimodal.registry import register_scheme
from vispe.multimodal.schemes.mrope import RoPE1D
from vispe.multimodal.streams.attention_blocks import Blocks
from vispe.utils.interval import Interval
from vispe.utils.options import NonNegativeFloat


@register_scheme
@dataclass(frozen=True)
class GroupPE(RoPE1D):
    """Count the tokens of each group separately (arXiv 2505.16983).

    New tokens of one group do not shift the other: a source may grow while its translation is generated, and cached
    keys remain valid. Groups are set by `Text.group`; positions then do not define which token came first, so
    attention needs a mask, such as `vispe.multimodal.streams.simultaneous_translation.group_mask`. Images are
    counted as in `rope1d`.

    Args:
        phi: start of the counters of groups 1, 2, ...; one number for all of them, or one number per group.
            The counter of group 0 starts at 0.
    """

    name: ClassVar[str] = "group_pe"
    summary: ClassVar[str] = (
        "A separate counter per group, such as source and target of streaming translation."
    )
    paper: ClassVar[str] = "LLM as Effective Streaming Processor, https://arxiv.org/abs/2505.16983"

    phi: NonNegativeFloat | Annotated[tuple[NonNegativeFloat, ...], Interval(least=1)] = 0.0

    def starts(self, blocks: Blocks) -> Tensor:
        """Return the start of the counter of each block's group (m).

        Raises:
            UnsupportedCombination: `phi` has fewer numbers than there are groups after the first.
        """
        if not isinstance(self.phi, tuple):
            return (blocks.group > 0).double() * self.phi
        largest = int(blocks.group.max())
        if largest > len(self.phi):
            raise UnsupportedCombination(
                f"phi={list(self.phi)} has starts for {counted(len(self.phi), 'group')} after the first, but the "
                f"stream has a group {largest}. Pass {counted(largest, 'number')}, or one for all."
            )
        starts = torch.tensor((0.0, *self.phi), dtype=torch.float64, device=blocks.group.device)
        return starts[blocks.group]
