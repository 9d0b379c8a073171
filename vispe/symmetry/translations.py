"""Where content stands: the same patches at another place of a canvas, and back, by moving values.

Offsets are whole patches, so nothing is resampled. Like an `Element` of D4, a placement serves pixels and tokens alike:
the side of a patch in values follows from the array. Two placements of one content on canvases of one size differ by
the place alone, which is what a model without positional bias does not see.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from vispe.errors import OptionError, ShapeError

Shape = tuple[int, int]
Box = tuple[int, int, int, int]
Fill = Literal["mean", "mirror", "image"]


@dataclass(frozen=True)
class Placement:
    """Content of some patches at an offset of a canvas; what does not fit on it is not seen.

    >>> there = Placement(content=(2, 2), canvas=(3, 4), offset=(1, 2))
    >>> there.apply(torch.ones(1, 2, 2)).tolist()
    [[[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0], [0.0, 0.0, 1.0, 1.0]]]

    Attributes:
        content: height and width of the content in patches.
        canvas: height and width of the canvas in patches.
        offset: of the content's first patch from the canvas's first, down and right, in patches; below 0 where the
            content begins outside.
        fill: what stands around the content: 'mean', the mean of the data; 'mirror', the content mirrored at its
            borders; or 'image', another image.
        box: top, left, bottom and right, in patches of the content, of what `undo` returns; all that is seen by
            default.

    Raises:
        OptionError: nothing of the content lies on the canvas, a `box` that is not seen, or an unknown fill.
    """

    content: Shape
    canvas: Shape
    offset: Shape = (0, 0)
    fill: Fill = "mean"
    box: Box | None = None

    def __post_init__(self) -> None:
        if self.fill not in get_args(Fill):
            raise OptionError(f"fill={self.fill!r} is not one of {', '.join(get_args(Fill))}.")
        if min(self.content) < 1 or _empty(self.seen):
            raise OptionError(
                f"Content of {self.content} patches at offset={self.offset} has none on a canvas of {self.canvas}; "
                "choose an offset at which some are seen."
            )
        if self.box is not None and (_empty(self.box) or _common(self.box, self.seen) != self.box):
            raise OptionError(f"box={self.box} is not within the patches {self.seen} that are seen.")

    @property
    def seen(self) -> Box:
        """Top, left, bottom and right of the part of the content on the canvas, in patches of the content."""
        (top, left), (bottom, right) = zip(
            *(
                (max(0, -o), min(n, size - o))
                for n, size, o in zip(self.content, self.canvas, self.offset, strict=True)
            ),
            strict=True,
        )
        return top, left, bottom, right

    def apply(self, values: Tensor, behind: Tensor | None = None, *, mean: float | Tensor = 0.0) -> Tensor:
        """Return the canvas with the content on it.

        Args:
            values: pixels or tokens of the content, (..., h s, w s) for content (h, w) and any whole s.
            behind: with fill='image', another image, (..., H', W') of any size; it is mirrored where it ends.
            mean: with fill='mean', the mean of the data, a number or (c, 1, 1); 0 suits normalised images.

        Returns:
            (..., H s, W s) for the canvas (H, W).

        Raises:
            ShapeError: values that are not of the content.
            OptionError: `behind` without fill='image', or missing with it.
        """
        s = self._scale(values, self.content)
        if (behind is None) == (self.fill == "image"):
            had = "no image" if behind is None else "an image"
            raise OptionError(
                f"fill={self.fill!r} was asked and {had} to stand behind the content was given."
            )
        size = tuple(n * s for n in self.canvas)
        if self.fill == "mirror":
            return _mirrored(values, size, tuple(o * s for o in self.offset))
        if behind is not None:
            # the content is copied into it below: what the caller gave stays as it is
            canvas = _mirrored(behind, size, (0, 0)).expand(*values.shape[:-2], *size).clone()
        else:
            level = torch.as_tensor(mean, dtype=values.dtype, device=values.device)
            canvas = level.expand(*values.shape[:-2], *size).clone()
        _cut(canvas, self._placed(self.seen), s).copy_(_cut(values, self.seen, s))
        return canvas

    def undo(self, values: Tensor) -> Tensor:
        """Return the content of a canvas, pixels or tokens (..., H s, W s): of `box`, or all that is seen.

        Raises:
            ShapeError: values that are not of the canvas.
        """
        s = self._scale(values, self.canvas)
        return _cut(values, self._placed(self.box or self.seen), s)

    @classmethod
    def draw(
        cls,
        generator: np.random.Generator,
        progress: float = 1.0,
        *,
        content: Shape,
        canvas: Shape,
        curriculum: float = 0.0,
        fill: Fill = "mean",
    ) -> Placement:
        """Return a placement at random: each at which as much of the content is seen as can be, as often.

        >>> Placement.draw(np.random.default_rng(0), 0.5, content=(4, 4), canvas=(8, 8), curriculum=1.0).canvas
        (6, 6)

        Args:
            generator: of the draw.
            progress: share of the run that is done, in [0, 1].
            content: in patches.
            canvas: in patches; a smaller one than the content shows a part of it.
            curriculum: share of the run over which the canvas grows from the size of the content, by a patch at once
                from the beginning on; 0 has the whole canvas at once.
            fill: what stands around the content.

        Raises:
            OptionError: `progress` or `curriculum` outside [0, 1].
        """
        if not 0 <= progress <= 1 or not 0 <= curriculum <= 1:
            raise OptionError(
                f"progress and curriculum are shares of a run from 0 to 1, got progress={progress} and "
                f"curriculum={curriculum}."
            )
        ramp = min(1.0, progress / curriculum) if curriculum else 1.0
        grown = tuple(_grown(n, size, ramp) for n, size in zip(content, canvas, strict=True))
        offset = tuple(_offset(size - n, generator) for n, size in zip(content, grown, strict=True))
        return cls(content, grown, offset, fill)

    def _placed(self, box: Box) -> Box:
        """Return a box of the content in patches of the canvas."""
        down, right = self.offset
        return box[0] + down, box[1] + right, box[2] + down, box[3] + right

    def _scale(self, values: Tensor, shape: Shape) -> int:
        """Return how many values a patch has along each side."""
        h, w = values.shape[-2:] if values.ndim > 1 else (0, 0)
        s = h // shape[0]
        if not s or (h, w) != (shape[0] * s, shape[1] * s):
            what = "content" if shape == self.content else "canvas"
            raise ShapeError(
                f"The {what} has {shape} patches, got values of shape {tuple(values.shape)}; give the same whole "
                "number of values for each patch along both axes."
            )
        return s


def shared(first: Placement, second: Placement) -> tuple[Placement, Placement]:
    """Return two placements of one content that undo to the patches that both show.

    >>> a, b = Placement((4, 4), (3, 3), (0, 0)), Placement((4, 4), (3, 3), (-1, 0))
    >>> shared(a, b)[0].box
    (1, 0, 3, 3)

    Raises:
        OptionError: they are of different contents, or show no patch in common.
    """
    box = _common(first.seen, second.seen)
    if first.content != second.content or _empty(box):
        raise OptionError(f"{first} and {second} show no patches of one content in common.")
    return replace(first, box=box), replace(second, box=box)


def _common(a: Box, b: Box) -> Box:
    return max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3])


def _empty(box: Box) -> bool:
    return box[0] >= box[2] or box[1] >= box[3]


def _cut(values: Tensor, box: Box, s: int) -> Tensor:
    return values[..., box[0] * s : box[2] * s, box[1] * s : box[3] * s]


def _mirrored(values: Tensor, size: Shape, offset: Shape) -> Tensor:
    """Return a window of an image that goes on mirrored at its borders, the image itself at `offset`."""
    for axis, length, start in zip((-2, -1), size, offset, strict=True):
        side = values.shape[axis]
        # the image and its mirror image in turn, with the border's values twice: whole patches stay whole
        at = (torch.arange(length, device=values.device) - start) % (2 * side)
        values = values.index_select(axis, torch.minimum(at, 2 * side - 1 - at))
    return values


def _grown(content: int, canvas: int, ramp: float) -> int:
    """Return a side of the canvas that has grown for a share of its way, by at least one patch."""
    way = abs(canvas - content)
    step = min(way, max(1, math.floor(way * ramp)))
    return content + (step if canvas > content else -step)


def _offset(spare: int, generator: np.random.Generator) -> int:
    """Return an offset at which the content is on the canvas, or the canvas within the content."""
    return int(generator.integers(min(0, spare), max(0, spare) + 1))
