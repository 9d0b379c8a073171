"""Frames along the diagonal t = h = w: VideoRoPE and HoPE; and TAD-RoPE, which adds time to a single position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from vispe.multimodal import allocation
from vispe.multimodal.registry import register_scheme
from vispe.multimodal.scheme import Scheme
from vispe.multimodal.sections import Sections, sections_for
from vispe.multimodal.streams.attention_blocks import Blocks
from vispe.multimodal.streams.visual_tokens import VisualTokens
from vispe.utils.interval import Interval
from vispe.utils.options import PositiveFloat


@register_scheme
@dataclass(frozen=True)
class VideoRoPE(Scheme):
    """Frames centred on the diagonal t = h = w, with time at the lowest frequencies (arXiv 2502.05173).

    Coordinates of a visual segment may lie below the counter at its start, and below 0 at the start of a sequence.

    Args:
        sections: pairs of channels of time, rows and columns; by default 1/4, 3/8, 3/8 of all. Rows and
            columns alternate over the highest frequencies for any sections.
        scale: counter steps from one frame to the next, on all axes.
        centre: row and column of the patch on the diagonal: ``'floor'`` of the middle, as in the authors'
            code, or the ``'exact'`` middle, which is between two patches if their number is even.
        after: text continues after the ``'time'`` of the last frame, which is within the range of its rows
            and columns, or after the largest coordinate of the visual segment (``'max'``).
        layout: ``'paper'`` is h w h w ... t t t; ``'package'`` is t h w h w ... t t t, as in the package
            Multimodal-RoPEs: pair 0 belongs to time, rows have the pairs of their section, and columns have
            one pair less than theirs.
        tokens_per_second: if set, and if the seconds between frames are known, the distance between frames is
            ``tokens_per_second * seconds`` instead of `scale`; fractions are preserved.
    """

    name: ClassVar[str] = "videorope"
    summary: ClassVar[str] = "Frames centred on the diagonal t = h = w; time has the lowest frequencies."
    paper: ClassVar[str] = "VideoRoPE, https://arxiv.org/abs/2502.05173"
    slowest: ClassVar[int] = allocation.T

    sections: Sections = None
    scale: PositiveFloat = 2.0
    centre: Literal["floor", "exact"] = "floor"
    after: Literal["time", "max"] = "time"
    layout: Literal["paper", "package"] = "paper"
    tokens_per_second: PositiveFloat | None = None

    def counter_step(self, blocks: Blocks, draws: Tensor | None) -> Tensor:
        """Return one more than the time of the last frame, or than the largest coordinate, in each block (m)."""
        t, h, w = blocks.size.double().unbind(1)
        last = (t - 1) * self._step(blocks, draws)
        if self.after == "max":
            last = last + torch.maximum(h - 1 - self._middle(h), w - 1 - self._middle(w))
        return last + 1

    def local(self, tokens: VisualTokens, draws: Tensor | None) -> Tensor:
        """Return time, time plus row, and time plus column (3, k), with rows and columns counted from the middle."""
        _, h, w = tokens.of(tokens.blocks.size).double().unbind(1)
        time = tokens.frame * tokens.of(self._step(tokens.blocks, draws))
        return torch.stack(
            [time, time + tokens.row - self._middle(h), time + tokens.column - self._middle(w)]
        )

    def _step(self, blocks: Blocks, draws: Tensor | None) -> Tensor:
        """Return the counter steps between frames of each block (m)."""
        step = torch.full_like(blocks.seconds, self.scale) if draws is None else draws.double()
        if self.tokens_per_second is None:
            return step
        return torch.where(blocks.seconds.isnan(), step, self.tokens_per_second * blocks.seconds)

    def _middle(self, side: Tensor) -> Tensor:
        middle = (side - 1) / 2
        return middle.floor() if self.centre == "floor" else middle

    def allocation(self, pairs: int, kv_heads: int = 1) -> Tensor:
        """Return alternating rows and columns, then time (pairs,)."""
        sections = sections_for(pairs, self.sections, 3 / 8)
        return allocation.video(sections, self.slowest, lead=self.layout == "package")


@register_scheme
@dataclass(frozen=True)
class HoPE(VideoRoPE):
    """VideoRoPE without rotation at the lowest frequencies, with random frame distances in training (arXiv 2505.20444).

    Time affects attention only through the diagonal, that is, through rows and columns. The last pairs of
    channels are not rotated for text either: a language model trained with plain RoPE needs further training.
    Options are those of `VideoRoPE`, and:

    Args:
        scale: counter steps between frames without a draw; below 1 for long videos. With `tokens_per_second`,
            neither `scale` nor `train_scales` affects videos with known seconds.
        train_scales: in training, the step of each visual segment is drawn from these values, segment by
            segment in the order of the sequence.
    """

    name: ClassVar[str] = "hope_vlm"
    summary: ClassVar[str] = (
        "VideoRoPE without rotation at the lowest frequencies; random frame distances in training."
    )
    paper: ClassVar[str] = "HoPE, https://arxiv.org/abs/2505.20444"
    slowest: ClassVar[int] = allocation.ZERO
    text_exact: ClassVar[bool] = False

    scale: PositiveFloat = 1.0
    train_scales: Annotated[tuple[PositiveFloat, ...], Interval(least=1)] = (0.5, 0.75, 1.0, 1.25, 1.5)

    def draw(self, blocks: Blocks, training: bool, generator: torch.Generator | None) -> Tensor | None:
        """Return the steps between frames of each block (m) in training, 1 for text; None otherwise."""
        if not training:
            return None
        device = blocks.seconds.device
        where = blocks.visual.nonzero()[:, 0]
        source = device if generator is None else generator.device
        drawn = torch.randint(len(self.train_scales), (len(where),), generator=generator, device=source)
        scales = torch.tensor(self.train_scales, dtype=torch.float64, device=device)
        return torch.ones_like(blocks.seconds).index_copy_(0, where, scales[drawn.to(device)])


@register_scheme
@dataclass(frozen=True)
class TADRoPE(Scheme):
    """Token index plus frame index as position; text advances by two (baseline in VideoRoPE, arXiv 2502.05173)."""

    name: ClassVar[str] = "tad_rope"
    summary: ClassVar[str] = "Index of all tokens plus frame index; text advances by two."
    paper: ClassVar[str] = "VideoRoPE (baseline), https://arxiv.org/abs/2502.05173"
    text_exact: ClassVar[bool] = False
    step: ClassVar[float] = 2.0

    @property
    def axes(self) -> int:
        """One axis."""
        return 1

    def counter_step(self, blocks: Blocks, draws: Tensor | None) -> Tensor:
        """Return the number of tokens plus that of frames (m)."""
        return (blocks.tokens + blocks.size[:, 0]).double()

    def local(self, tokens: VisualTokens, draws: Tensor | None) -> Tensor:
        """Return the index of each token plus that of its frame in its block (1, k)."""
        return (tokens.index + tokens.frame)[None]

    def allocation(self, pairs: int, kv_heads: int = 1) -> Tensor:
        """Return axis 0 for every pair (pairs,)."""
        return allocation.single(pairs)
