"""TMRoPE: MRoPE with frames at 25 positions per second, as audio (Qwen-Omni)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vispe.multimodal import allocation
from vispe.multimodal.registry import register_scheme
from vispe.multimodal.schemes.mrope import MRoPE
from vispe.multimodal.sections import sections_for
from vispe.utils.options import PositiveFloat


@register_scheme
@dataclass(frozen=True)
class TMRoPE(MRoPE):
    """MRoPE with frames at ``floor(frame * seconds * 25)`` (arXiv 2503.20215; Qwen2.5-Omni).

    An audio token lasts 40 ms and has one position, like a text token; so describe audio alone as a run of
    text in a stream. Audio interleaved with a video cannot be described by a stream. Options are those of
    `MRoPE`; videos with unknown seconds are counted by `stride`.
    """

    name: ClassVar[str] = "tmrope"
    summary: ClassVar[str] = "MRoPE with frames at 25 positions per second, as audio (Qwen2.5-Omni)."
    paper: ClassVar[str] = "Qwen2.5-Omni, https://arxiv.org/abs/2503.20215"

    tokens_per_second: PositiveFloat | None = 25.0

    def _time(self, frame: Tensor, seconds: Tensor) -> Tensor:
        if self.tokens_per_second is None:
            return frame * self.stride
        clock = self._clock(frame, seconds)
        # as in float32 implementations, in the order of operations of the reference
        narrow = self._clock(frame.float(), seconds.float()).double()
        clock = torch.where(seconds == seconds.float(), narrow, clock)
        return torch.where(seconds.isnan(), frame * self.stride, clock)

    def _clock(self, frame: Tensor, seconds: Tensor) -> Tensor:
        """Return the positions of frames that are `seconds` apart from each other."""
        return (frame * seconds * (self.tokens_per_second or 0)).floor()


@register_scheme
@dataclass(frozen=True)
class TMRoPEInterleaved(TMRoPE):
    """TMRoPE with fractional positions and axes interleaved over all frequencies (arXiv 2509.17765; Qwen3-Omni).

    Options are those of `TMRoPE`, `sections` and `clip` as for `mrope_i`.

    Args:
        clip: truncate sections that do not fit, as public code does, instead of raising an error.
    """

    name: ClassVar[str] = "tmrope_i"
    summary: ClassVar[str] = (
        "TMRoPE with fractional positions and axes interleaved over all frequencies (Qwen3-Omni)."
    )
    paper: ClassVar[str] = "Qwen3-Omni, https://arxiv.org/abs/2509.17765"
    share: ClassVar[float] = 20 / 64

    clip: bool = False

    def _clock(self, frame: Tensor, seconds: Tensor) -> Tensor:
        return frame * seconds * (self.tokens_per_second or 0)

    def allocation(self, pairs: int, kv_heads: int = 1) -> Tensor:
        """Return interleaved time, rows and columns (pairs,)."""
        return allocation.interleaved(sections_for(pairs, self.sections, self.share), self.clip)
