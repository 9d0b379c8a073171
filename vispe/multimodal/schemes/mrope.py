"""MRoPE and its relatives: text counts on all three axes, pictures have frames, rows and columns of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from vispe.errors import OptionError
from vispe.multimodal import allocation
from vispe.multimodal.registry import register_scheme
from vispe.multimodal.scheme import Scheme, VisualTokens
from vispe.multimodal.sections import Sections, sections_for
from vispe.multimodal.streams.attention_blocks import Blocks
from vispe.options import Positive


@register_scheme
@dataclass(frozen=True)
class RoPE1D(Scheme):
    """Count all tokens in one line, as models without a scheme do (arXiv 2104.09864)."""

    name: ClassVar[str] = "rope1d"
    summary: ClassVar[str] = "All tokens in one line: text, then each picture in raster order."
    paper: ClassVar[str] = "RoFormer, https://arxiv.org/abs/2104.09864"

    @property
    def axes(self) -> int:
        """One."""
        return 1

    def advance(self, blocks: Blocks, draws: Tensor | None) -> Tensor:
        """Return the number of tokens (m)."""
        return blocks.tokens.double()

    def local(self, tokens: VisualTokens, draws: Tensor | None) -> Tensor:
        """Return the number of each token in its block (1, k)."""
        return tokens.index.double()[None]

    def allocation(self, pairs: int, kv_heads: int = 1) -> Tensor:
        """Return axis 0 for every pair (pairs,)."""
        return allocation.single(pairs)


@register_scheme
@dataclass(frozen=True)
class MRoPE(Scheme):
    """Frames, rows and columns on three axes from where the picture stands in the text (arXiv 2409.12191).

    The defaults are those of Qwen2-VL but for the rule of what follows a video; see `after`.

    Args:
        sections: pairs of channels of time, rows and columns; by default 1/4, 3/8, 3/8 of all.
        stride: counter steps from one frame to the next.
        spatial_reset: rows and columns of every picture are counted from 0, whatever text comes before.
        after: text goes on after the largest coordinate of the picture (``'max'``), or, as Hugging Face's models have
            it, after its larger side whatever its frames (``'side'``), inside the time range of a long video.
        tokens_per_second: where set, and the seconds between frames are known, frames are
            ``floor(frame * tokens_per_second * seconds)`` instead of ``frame * stride`` (Qwen2.5-VL).
        text_axes: ``'all'``, or ``'time'`` for text at (t, 0, 0), which is not text-exact.
    """

    name: ClassVar[str] = "mrope"
    summary: ClassVar[str] = "Time, rows and columns on three axes; chunks of channels for each (Qwen2-VL)."
    paper: ClassVar[str] = "Qwen2-VL, https://arxiv.org/abs/2409.12191"
    share: ClassVar[float] = 3 / 8

    sections: Sections = None
    stride: Positive = 1.0
    spatial_reset: bool = False
    after: Literal["max", "side"] = "max"
    tokens_per_second: Positive | None = None
    text_axes: Literal["all", "time"] = "all"

    @property
    def follows(self) -> tuple[bool, ...]:
        """Rows and columns do unless they are reset."""
        return True, not self.spatial_reset, not self.spatial_reset

    def advance(self, blocks: Blocks, draws: Tensor | None) -> Tensor:
        """Return one more than the largest coordinate inside each block (m)."""
        t, h, w = blocks.size.double().unbind(1)
        sides = torch.maximum(h, w) - 1
        return (
            sides if self.after == "side" else torch.maximum(sides, self._time(t - 1, blocks.seconds))
        ) + 1

    def local(self, tokens: VisualTokens, draws: Tensor | None) -> Tensor:
        """Return frame, row and column (3, k)."""
        time = self._time(tokens.frame, tokens.of(tokens.blocks.seconds))
        return torch.stack([time, tokens.row, tokens.column])

    def _time(self, frame: Tensor, seconds: Tensor) -> Tensor:
        time = frame * self.stride
        if self.tokens_per_second is None:
            return time
        clock = (frame * (self.tokens_per_second * seconds)).floor()
        narrow = (
            frame.float() * (self.tokens_per_second * seconds.float())
        ).floor()  # of what came as float32
        clock = torch.where(seconds == seconds.float(), narrow, clock)
        return torch.where(seconds.isnan(), time, clock)

    def text(self, at: Tensor) -> Tensor:
        """Return the counter on all axes, or on that of time."""
        same = super().text(at)
        return (
            same if self.text_axes == "all" else torch.stack([at, torch.zeros_like(at), torch.zeros_like(at)])
        )

    def allocation(self, pairs: int, kv_heads: int = 1) -> Tensor:
        """Return chunks of pairs for time, rows and columns (pairs,)."""
        return allocation.chunked(sections_for(pairs, self.sections, self.share))


@register_scheme
@dataclass(frozen=True)
class MRoPEInterleaved(MRoPE):
    """MRoPE whose axes take turns over all frequencies: t h w t h w ... (arXiv 2510.23095; Qwen3-VL).

    Options are those of `MRoPE`; `sections` are 24, 20, 20 of 64 by default. The paper's own variant is
    ``spatial_reset=True``; released models do without. And

    Args:
        clip: take sections that do not fit for as many pairs as do, as public code does, instead of an error.
    """

    name: ClassVar[str] = "mrope_i"
    summary: ClassVar[str] = "MRoPE whose axes take turns over all frequencies (Qwen3-VL)."
    paper: ClassVar[str] = "Revisiting Multimodal Positional Encoding, https://arxiv.org/abs/2510.23095"
    share: ClassVar[float] = 20 / 64

    clip: bool = False

    def allocation(self, pairs: int, kv_heads: int = 1) -> Tensor:
        """Return time, rows and columns in turn (pairs,)."""
        return allocation.interleaved(sections_for(pairs, self.sections, self.share), self.clip)


@register_scheme
@dataclass(frozen=True)
class ErnieVL(MRoPE):
    """MRoPE whose rows and columns take turns over the high frequencies, with time on the lowest (Ernie 4.5 VL).

    Options are those of `MRoPE`; `sections` has time, rows and columns, 20, 22, 22 of 64 by default. The order of
    frequencies is that of VideoRoPE, the coordinates are those of `mrope`. Read from transformers' implementation; a
    paper that states it was not found.
    """

    name: ClassVar[str] = "ernie_vl"
    summary: ClassVar[str] = (
        "MRoPE with rows and columns in turn, then time on the lowest frequencies (Ernie 4.5 VL)."
    )
    paper: ClassVar[str] = "MRoPE, with the frequencies of Ernie 4.5 VL, https://arxiv.org/abs/2409.12191"
    share: ClassVar[float] = 22 / 64

    def allocation(self, pairs: int, kv_heads: int = 1) -> Tensor:
        """Return rows and columns in turn, then time (pairs,)."""
        return allocation.video(sections_for(pairs, self.sections, self.share))


@register_scheme
@dataclass(frozen=True)
class MHRoPE(MRoPE):
    """MRoPE with whole heads for each axis (arXiv 2510.23095).

    Options are those of `MRoPE`, but `sections` counts key heads: 1/4, 3/8, 3/8 of them by default. Heads beyond the
    sections do not turn at all, and then text is not encoded as before.
    """

    name: ClassVar[str] = "mhrope"
    summary: ClassVar[str] = "MRoPE with whole heads for each axis, all frequencies in each."
    paper: ClassVar[str] = "Revisiting Multimodal Positional Encoding, https://arxiv.org/abs/2510.23095"

    def allocation(self, pairs: int, kv_heads: int = 1) -> Tensor:
        """Return one axis for each key head (kv_heads, pairs)."""
        if self.sections is None and kv_heads < 3:
            raise OptionError(
                f"mhrope needs a key head for each of time, rows and columns; the model has {kv_heads}. Name their "
                "heads in sections, or use mrope_i."
            )
        sections = self.sections or sections_for(kv_heads, None, self.share)
        return allocation.multi_head(sections, kv_heads, pairs)


@register_scheme
@dataclass(frozen=True)
class MMRoPE(MRoPE):
    """MRoPE with stretched axes and the pattern t t h w h w h w over all frequencies (Lumos-1).

    Options are those of `MRoPE` and

    Args:
        scale: what frames, rows and columns are multiplied by.
    """

    name: ClassVar[str] = "mmrope"
    summary: ClassVar[str] = "MRoPE with stretched axes, in the pattern t t h w h w h w (Lumos-1)."
    paper: ClassVar[str] = "Lumos-1, https://arxiv.org/abs/2507.08801"

    scale: tuple[Positive, Positive, Positive] = (1.0, 1.0, 1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sections is not None:
            raise OptionError("mmrope has a fixed pattern of axes; leave sections out.")

    def advance(self, blocks: Blocks, draws: Tensor | None) -> Tensor:
        """Return one more than the largest stretched coordinate inside each block (m)."""
        t, h, w = blocks.size.double().unbind(1)
        ends = [self._time(t - 1, blocks.seconds), h - 1, w - 1]
        stretched = torch.stack([e * s for e, s in zip(ends, self.scale, strict=True)])
        return (stretched[1:] if self.after == "side" else stretched).amax(0) + 1

    def local(self, tokens: VisualTokens, draws: Tensor | None) -> Tensor:
        """Return frame, row and column, stretched (3, k)."""
        scale = torch.tensor(self.scale, dtype=torch.float64, device=tokens.index.device)
        return super().local(tokens, draws) * scale[:, None]

    def allocation(self, pairs: int, kv_heads: int = 1) -> Tensor:
        """Return t t h w h w h w again and again (pairs,)."""
        return allocation.distributed(pairs)
