"""MRoPE and variants: text is counted on all three axes, visual tokens have frame, row and column."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from vispe.errors import OptionError, counted
from vispe.multimodal import allocation
from vispe.multimodal.registry import register_scheme
from vispe.multimodal.scheme import Scheme
from vispe.multimodal.sections import Sections, sections_for
from vispe.multimodal.streams.attention_blocks import Blocks
from vispe.multimodal.streams.visual_tokens import VisualTokens
from vispe.utils.options import PositiveFloat


@register_scheme
@dataclass(frozen=True)
class RoPE1D(Scheme):
    """Sequential positions of all tokens, as in models without a scheme (arXiv 2104.09864)."""

    name: ClassVar[str] = "rope1d"
    summary: ClassVar[str] = "Sequential positions of all tokens, images in raster order."
    paper: ClassVar[str] = "RoFormer, https://arxiv.org/abs/2104.09864"

    @property
    def axes(self) -> int:
        """One axis."""
        return 1

    def counter_step(self, blocks: Blocks, draws: Tensor | None) -> Tensor:
        """Return the number of tokens (m)."""
        return blocks.tokens.double()

    def local(self, tokens: VisualTokens, draws: Tensor | None) -> Tensor:
        """Return the index of each token in its block (1, k)."""
        return tokens.index.double()[None]

    def allocation(self, pairs: int, kv_heads: int = 1) -> Tensor:
        """Return axis 0 for every pair (pairs,)."""
        return allocation.single(pairs)


@register_scheme
@dataclass(frozen=True)
class MRoPE(Scheme):
    """Frames, rows and columns on three axes, starting at the image's position in the text (arXiv 2409.12191).

    The defaults are those of Qwen2-VL, except for the position after a video; see `after`.

    Args:
        sections: pairs of channels of time, rows and columns; by default 1/4, 3/8, 3/8 of all.
        stride: counter steps between frames.
        spatial_reset: count rows and columns of every image from 0, independent of the preceding text.
        after: text continues after the largest coordinate of the visual segment (``'max'``), or, as in
            Hugging Face's models, after the larger of its height and width, independent of the number of
            frames (``'side'``). In the second case, text after a long video lies within the time range of the
            video.
        tokens_per_second: if set, and the seconds between frames are known, frames are at
            ``floor(frame * tokens_per_second * seconds)`` instead of ``frame * stride`` (Qwen2.5-VL).
        text_axes: ``'all'``, or ``'time'`` for text at (t, 0, 0), which is not text-exact.
    """

    name: ClassVar[str] = "mrope"
    summary: ClassVar[str] = "Time, rows and columns on three axes; a chunk of channels per axis (Qwen2-VL)."
    paper: ClassVar[str] = "Qwen2-VL, https://arxiv.org/abs/2409.12191"
    share: ClassVar[float] = 3 / 8

    sections: Sections = None
    stride: PositiveFloat = 1.0
    spatial_reset: bool = False
    after: Literal["max", "side"] = "max"
    tokens_per_second: PositiveFloat | None = None
    text_axes: Literal["all", "time"] = "all"

    @property
    def follows_text(self) -> tuple[bool, ...]:
        """True for time; true for rows and columns without `spatial_reset`."""
        return True, not self.spatial_reset, not self.spatial_reset

    def counter_step(self, blocks: Blocks, draws: Tensor | None) -> Tensor:
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
        ).floor()  # as in float32 implementations
        clock = torch.where(seconds == seconds.float(), narrow, clock)
        return torch.where(seconds.isnan(), time, clock)

    def text(self, at: Tensor) -> Tensor:
        """Return the counter on all axes, or only on the time axis."""
        counter = super().text(at)
        return (
            counter
            if self.text_axes == "all"
            else torch.stack([at, torch.zeros_like(at), torch.zeros_like(at)])
        )

    def allocation(self, pairs: int, kv_heads: int = 1) -> Tensor:
        """Return chunks of pairs for time, rows and columns (pairs,)."""
        return allocation.chunked(sections_for(pairs, self.sections, self.share))


@register_scheme
@dataclass(frozen=True)
class MRoPEInterleaved(MRoPE):
    """MRoPE with axes interleaved over all frequencies: t h w t h w ... (arXiv 2510.23095; Qwen3-VL).

    Options are those of `MRoPE`; `sections` are 24, 20, 20 of 64 by default. The paper's variant is
    ``spatial_reset=True``; released models do not use it. In addition:

    Args:
        clip: truncate sections that do not fit, as public code does, instead of raising an error.
    """

    name: ClassVar[str] = "mrope_i"
    summary: ClassVar[str] = "MRoPE with axes interleaved over all frequencies (Qwen3-VL)."
    paper: ClassVar[str] = "Revisiting Multimodal Positional Encoding, https://arxiv.org/abs/2510.23095"
    share: ClassVar[float] = 20 / 64

    clip: bool = False

    def allocation(self, pairs: int, kv_heads: int = 1) -> Tensor:
        """Return interleaved time, rows and columns (pairs,)."""
        return allocation.interleaved(sections_for(pairs, self.sections, self.share), self.clip)


@register_scheme
@dataclass(frozen=True)
class ErnieVL(MRoPE):
    """MRoPE with rows and columns interleaved over the high frequencies, and time on the lowest (Ernie 4.5 VL).

    Options are those of `MRoPE`; `sections` has time, rows and columns, 20, 22, 22 of 64 by default. The order of
    frequencies is that of VideoRoPE, the coordinates are those of `mrope`. Based on the transformers implementation; a
    paper that describes it was not found.
    """

    name: ClassVar[str] = "ernie_vl"
    summary: ClassVar[str] = (
        "MRoPE with interleaved rows and columns, then time on the lowest frequencies (Ernie 4.5 VL)."
    )
    paper: ClassVar[str] = "MRoPE, with the frequencies of Ernie 4.5 VL, https://arxiv.org/abs/2409.12191"
    share: ClassVar[float] = 22 / 64

    def allocation(self, pairs: int, kv_heads: int = 1) -> Tensor:
        """Return interleaved rows and columns, then time (pairs,)."""
        return allocation.video(sections_for(pairs, self.sections, self.share))


@register_scheme
@dataclass(frozen=True)
class MHRoPE(MRoPE):
    """MRoPE with an axis per head (arXiv 2510.23095).

    Options are those of `MRoPE`, but `sections` counts key heads: 1/4, 3/8, 3/8 of them by default. Heads
    beyond the sections are not rotated; with such heads, the encoding of text differs from 1D RoPE.
    """

    name: ClassVar[str] = "mhrope"
    summary: ClassVar[str] = "MRoPE with an axis per head, each with all frequencies."
    paper: ClassVar[str] = "Revisiting Multimodal Positional Encoding, https://arxiv.org/abs/2510.23095"

    def allocation(self, pairs: int, kv_heads: int = 1) -> Tensor:
        """Return one axis for each key head (kv_heads, pairs)."""
        if self.sections is None and kv_heads < 3:
            raise OptionError(
                f"mhrope needs a key head for each of time, rows and columns, got {counted(kv_heads, 'key head')}. "
                "Set sections, or use mrope_i."
            )
        sections = self.sections or sections_for(kv_heads, None, self.share)
        return allocation.multi_head(sections, kv_heads, pairs)


@register_scheme
@dataclass(frozen=True)
class MMRoPE(MRoPE):
    """MRoPE with scaled axes and the pattern t t h w h w h w over all frequencies (Lumos-1).

    Options are those of `MRoPE`, and:

    Args:
        scale: factors of frames, rows and columns.
    """

    name: ClassVar[str] = "mmrope"
    summary: ClassVar[str] = "MRoPE with scaled axes, in the pattern t t h w h w h w (Lumos-1)."
    paper: ClassVar[str] = "Lumos-1, https://arxiv.org/abs/2507.08801"

    scale: tuple[PositiveFloat, PositiveFloat, PositiveFloat] = (1.0, 1.0, 1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sections is not None:
            raise OptionError("mmrope has a fixed pattern of axes, got sections. Omit sections.")

    def counter_step(self, blocks: Blocks, draws: Tensor | None) -> Tensor:
        """Return one more than the largest scaled coordinate in each block (m)."""
        t, h, w = blocks.size.double().unbind(1)
        bounds = [self._time(t - 1, blocks.seconds), h - 1, w - 1]
        stretched = torch.stack([e * s for e, s in zip(bounds, self.scale, strict=True)])
        return (stretched[1:] if self.after == "side" else stretched).amax(0) + 1

    def local(self, tokens: VisualTokens, draws: Tensor | None) -> Tensor:
        """Return scaled frame, row and column (3, k)."""
        scale = torch.tensor(self.scale, dtype=torch.float64, device=tokens.index.device)
        return super().local(tokens, draws) * scale[:, None]

    def allocation(self, pairs: int, kv_heads: int = 1) -> Tensor:
        """Return the repeated pattern t t h w h w h w (pairs,).

        Raises:
            OptionError: there are fewer than four pairs of channels.
        """
        if pairs < 4:
            raise OptionError(
                f"mmrope needs at least 4 pairs of channels for its pattern of axes, got {pairs} per head."
            )
        return allocation.distributed(pairs)
