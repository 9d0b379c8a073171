"""V2PE: smaller position increments for visual tokens than for text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from vispe.errors import InputError, OptionError, counted
from vispe.multimodal import allocation
from vispe.multimodal.registry import register_scheme
from vispe.multimodal.scheme import Scheme
from vispe.multimodal.streams.attention_blocks import Blocks
from vispe.multimodal.streams.token_stream import Stream
from vispe.multimodal.streams.visual_tokens import VisualTokens

STRIDES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # training strides of the authors

Number = float | Fraction | str


@register_scheme
@dataclass(frozen=True)
class V2PE(Scheme):
    """Sequential positions of all tokens, with increments below 1 for visual tokens (arXiv 2412.09616).

    A tile of n tokens spans `stride` positions for any n: consecutive tokens of a tile are ``stride / n``
    apart from each other. Text continues at the next integer, ``ceil(last) + 1``. With a stride of n, an
    image is counted as in `rope1d`. Positions increase strictly. Compute their angles in float32 or wider, as
    `vispe.multimodal.rotation` does: in bfloat16 most positions would coincide.

    Args:
        stride: number of positions spanned by a tile, or by a frame of a video: a number, a `Fraction` or a
            string such as ``'1/3'``. Cached keys are only valid for the same stride.
        per: ``'tile'``, or ``'picture'`` for a span of `stride` over all tiles of an image.
        train_strides: strides from which that of each image is drawn in training; `stride` if None. The
            draws can also be passed: `draws` of `Scheme.coordinates` is then the stride of each block.

    Differs from the reference: positions are computed by products in float64, so any number of tokens is supported; the
    reference accumulates in float32 and fails for most numbers that are not powers of two.
    """

    name: ClassVar[str] = "v2pe"
    summary: ClassVar[str] = (
        "Sequential positions with increments below 1 for visual tokens; random increments in training."
    )
    paper: ClassVar[str] = "V2PE, https://arxiv.org/abs/2412.09616"

    applies_scale: ClassVar[bool] = (
        True  # a scaled image has another stride, and text continues at an integer
    )

    stride: Number = 16
    per: Literal["tile", "picture"] = "tile"
    train_strides: tuple[Number, ...] | None = STRIDES

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.train_strides is not None and not self.train_strides:
            raise OptionError(
                "train_strides needs at least one stride, got none. Use null for no random strides."
            )
        for stride in (self.stride, *(self.train_strides or ())):
            _value(stride)
        object.__setattr__(self, "stride", _plain(self.stride))  # options are plain data
        if self.train_strides is not None:
            object.__setattr__(self, "train_strides", tuple(map(_plain, self.train_strides)))

    @property
    def axes(self) -> int:
        """One axis."""
        return 1

    def draw(self, blocks: Blocks, training: bool, generator: torch.Generator | None) -> Tensor | None:
        """Return the stride of each block (m) in training, shared by all parts of an image; 0 for text."""
        if not training or self.train_strides is None:
            return None
        device = blocks.kind.device if generator is None else generator.device
        choices = torch.tensor([_value(s) for s in self.train_strides], dtype=torch.float64, device=device)
        picks = choices[torch.randint(len(choices), blocks.kind.shape, device=device, generator=generator)]
        picks = picks.to(blocks.kind.device)[blocks.picture.clamp(min=0)]
        return torch.where(blocks.visual, picks, 0.0)

    def counter_step(self, blocks: Blocks, draws: Tensor | None) -> Tensor:
        """Return the span of each image as the step of its last part, rounded up (m)."""
        frames = blocks.size[:, 0]
        spans = self._strides(blocks, draws) * (frames if self.per == "picture" else frames * blocks.parts)
        return torch.where(blocks.ends, _rounded_up(spans), 0.0)

    def local(self, tokens: VisualTokens, draws: Tensor | None) -> Tensor:
        """Return the position of each token relative to the last text token, minus 1 (1, k)."""
        blocks = tokens.blocks
        unit = blocks.size[:, 1] * blocks.size[:, 2] * (blocks.parts if self.per == "picture" else 1)
        number = tokens.of(blocks.part * blocks.tokens) + tokens.index + 1
        return (number * tokens.of(self._strides(blocks, draws)) / tokens.of(unit) - 1)[None]

    def _strides(self, blocks: Blocks, draws: Tensor | None) -> Tensor:
        """Return the stride of each block (m), float64."""
        fixed = torch.full(
            blocks.kind.shape, _value(self.stride), dtype=torch.float64, device=blocks.kind.device
        )
        strides = fixed if draws is None else draws.to(fixed)
        return strides if blocks.scale is None else strides * blocks.scale

    def allocation(self, pairs: int, kv_heads: int = 1) -> Tensor:
        """Return axis 0 for every pair (pairs,)."""
        return allocation.single(pairs)


def v2pe_stride_for(
    stream: Stream,
    context: float,
    strides: Sequence[Number] = STRIDES,
    per: Literal["tile", "picture"] = "tile",
) -> Number:
    """Return the largest stride for which all samples of a stream fit into a number of positions.

    Args:
        stream: the token stream.
        context: positions available to a sample, 0 .. context - 1, without those of generated tokens.
        strides: strides to choose from.
        per: see `V2PE`.

    Raises:
        InputError: the smallest stride does not fit.
        OptionError: there are no strides, or one is invalid.

    Example:
        >>> from vispe.multimodal import Image, Text
        >>> stream = Stream.of([[Text(10), Image(4, 4)]])
        >>> v2pe_stride_for(stream, context=20)
        8
    """
    if not strides:
        raise OptionError("v2pe_stride_for needs at least one stride to choose from, got none.")
    used = 0.0
    for stride in sorted(strides, key=_value, reverse=True):
        coordinates = V2PE(stride, per).coordinates(stream, padding=-1)
        used = max(float(coordinates.ids.max().ceil()) + 1, float(coordinates.next.max()))
        if used <= context:
            return stride
    raise InputError(
        f"The stream needs {counted(f'{used:g}', 'position')} with the smallest stride, {min(strides, key=_value)}, "
        f"but the context has {context:g}. Shorten the text, omit images, or allow smaller strides."
    )


def _value(stride: Any) -> float:
    """Return a checked stride as a number."""
    try:
        value = None if isinstance(stride, bool) else float(Fraction(stride))
    except (TypeError, ValueError, ZeroDivisionError, OverflowError):
        value = None
    if value is None or not 0 < value < float("inf"):
        raise OptionError(
            f"A stride of v2pe must be a number above 0, or a fraction such as '1/3', got {stride!r}."
        )
    return value


def _plain(stride: Number) -> float | str:
    """Return a fraction as a string."""
    return str(stride) if isinstance(stride, Fraction) else stride


def _rounded_up(spans: Tensor) -> Tensor:
    """Return the ceiling, with tolerance for rounding errors of the products."""
    near = spans.round()
    return torch.where((spans - near).abs() <= near * 2**-44, near, spans.ceil())
