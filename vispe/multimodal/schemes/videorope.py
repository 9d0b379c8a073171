"""Frames along the diagonal t = h = w: VideoRoPE, HoPE, and TAD-RoPE, which puts time onto a single count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from vispe.multimodal import allocation
from vispe.multimodal.registry import register_scheme
from vispe.multimodal.scheme import Scheme, VisualTokens
from vispe.multimodal.sections import Sections, sections_for
from vispe.multimodal.streams.attention_blocks import Blocks
from vispe.options import Interval, PositiveFloat


@register_scheme
@dataclass(frozen=True)
class VideoRoPE(Scheme):
    """Every frame is centred on the diagonal t = h = w, and time has the lowest frequencies (arXiv 2502.05173).

    Coordinates of a visual segment may lie below the counter at its start, and below 0 at the start of a sequence.

    Args:
        sections: pairs of channels of time, rows and columns; by default 1/4, 3/8, 3/8 of all. Rows and columns take
            turns over the highest frequencies whatever their shares.
        scale: counter steps from one frame to the next, on all axes.
        centre: row and column of the patch on the diagonal: ``'floor'`` of the middle, as the authors' code has it, or
            the ``'exact'`` middle, which is between two patches where there is an even number of them.
        after: text goes on after the last frame's ``'time'``, inside the range of its rows and columns, or after the
            largest coordinate of the visual segment (``'max'``).
        layout: ``'paper'`` is h w h w ... t t t; ``'package'`` is t h w h w ... t t t, as the package Multimodal-RoPEs
            has it: pair 0 is time's, and rows have as many pairs as their section says, columns one less.
        tokens_per_second: where set, and the seconds between frames are known, the distance of frames is
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
        """Return one more than the last frame's time, or than the largest coordinate, inside each block (m)."""
        t, h, w = blocks.size.double().unbind(1)
        last = (t - 1) * self._step(blocks, draws)
        if self.after == "max":
            last = last + torch.maximum(h - 1 - self._middle(h), w - 1 - self._middle(w))
        return last + 1

    def local(self, tokens: VisualTokens, draws: Tensor | None) -> Tensor:
        """Return time, and time plus the row and the column counted from the middle (3, k)."""
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

    Time acts only along the diagonal. The last pairs of channels are not rotated for text either: a language model
    trained with plain RoPE needs further training. Options are those of `VideoRoPE` and

    Args:
        scale: counter steps between frames if nothing is drawn; below 1 for long videos. With
            `tokens_per_second`, videos with known seconds use neither this nor the draws.
        train_scales: in training, the step of each visual segment is drawn from these, in the order of the sequence.
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
    """Index of all tokens plus frame index; text advances by two (VideoRoPE's baseline, arXiv 2502.05173)."""

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
