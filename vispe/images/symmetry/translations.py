"""Translations of image content by whole patches on a canvas, and their inverse, without resampling.

Like an `Element` of D4, a placement applies to pixels and tokens; the number of values per patch follows from the
array. Two placements of one content on canvases of equal size differ only in position, to which a model without
positional bias is invariant.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from vispe.errors import OptionError, ShapeError
from vispe.utils.options import Options

Shape = tuple[int, int]
Box = tuple[int, int, int, int]
Fill = Literal["mean", "mirror", "image"]


@dataclass(frozen=True)
class Placement(Options):
    """Content of some patches at an offset on a canvas; parts outside of the canvas are cropped.

    Example:
        >>> placement = Placement(content=(2, 2), canvas=(3, 4), offset=(1, 2))
        >>> placement.apply(torch.ones(1, 2, 2)).tolist()
        [[[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0], [0.0, 0.0, 1.0, 1.0]]]

    Attributes:
        content: height and width of the content in patches.
        canvas: height and width of the canvas in patches.
        offset: offset of the content's first patch from the canvas's first, down and right, in patches; negative if the
            content begins outside of the canvas.
        fill: background: 'mean', the mean of the data; 'mirror', the content reflected at its borders; or 'image',
            another image.
        box: top, left, bottom and right of the part that `undo` returns, in patches of the content; the visible part by
            default.

    Raises:
        OptionError: no part of the content is on the canvas, `box` is not visible, or `fill` is unknown.
    """

    content: Shape
    canvas: Shape
    offset: Shape = (0, 0)
    fill: Fill = "mean"
    box: Box | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.content) < 1 or _empty(self.seen):
            raise OptionError(
                f"Placement: content of {self.content} patches at offset={self.offset} is outside of the canvas "
                f"{self.canvas}. Use an offset at which some patches are visible."
            )
        if self.box is not None and (_empty(self.box) or _intersection(self.box, self.seen) != self.box):
            raise OptionError(
                f"Placement: box must be within the visible patches {self.seen}, got box={self.box}."
            )

    @property
    def seen(self) -> Box:
        """Visible part of the content: top, left, bottom and right, in patches of the content."""
        # per axis: intersection of the content [0, n) with the canvas [-o, size - o)
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
            values: pixels or tokens of the content, (..., h s, w s) for content (h, w) and any integer s.
            behind: with fill='image', the background (..., H', W') of any size; it is reflected at its borders.
            mean: with fill='mean', the mean of the data, a number or (c, 1, 1); 0 for normalised images.

        Returns:
            (..., H s, W s) for the canvas (H, W).

        Raises:
            ShapeError: `values` does not have the shape of the content.
            OptionError: `behind` without fill='image', or fill='image' without `behind`.
        """
        s = self._scale(values, self.content)
        if (behind is None) == (self.fill == "image"):
            background = "behind=None" if behind is None else "an image as behind"
            raise OptionError(
                f"Placement: behind is required with fill='image' only, got fill={self.fill!r} and {background}."
            )
        size = tuple(n * s for n in self.canvas)
        if self.fill == "mirror":
            # from patches to values
            return _reflected(values, size, tuple(o * s for o in self.offset))
        if behind is not None:
            # clone, since the content is copied into it below
            canvas = _reflected(behind, size, (0, 0)).expand(*values.shape[:-2], *size).clone()
        else:
            level = torch.as_tensor(mean, dtype=values.dtype, device=values.device)
            canvas = level.expand(*values.shape[:-2], *size).clone()
        _crop(canvas, self._on_canvas(self.seen), s).copy_(_crop(values, self.seen, s))
        return canvas

    def undo(self, values: Tensor) -> Tensor:
        """Return the part `box` of the content (the visible part by default) from a canvas (..., H s, W s).

        Raises:
            ShapeError: `values` does not have the shape of the canvas.
        """
        s = self._scale(values, self.canvas)
        return _crop(values, self._on_canvas(self.box or self.seen), s)

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
        """Return a random placement, uniform over those that show the largest possible part of the content.

        >>> Placement.draw(np.random.default_rng(0), 0.5, content=(4, 4), canvas=(8, 8), curriculum=1.0).canvas
        (6, 6)

        Args:
            generator: random generator.
            progress: completed fraction of the run, in [0, 1].
            content: height and width in patches.
            canvas: height and width in patches; if smaller than the content, it shows a part of it.
            curriculum: fraction of the run over which the canvas grows from the size of the content to `canvas`,
                beginning with one patch; 0 uses `canvas` from the start.
            fill: background, see `Placement`.

        Raises:
            OptionError: `progress` or `curriculum` is not in [0, 1].
        """
        if not 0 <= progress <= 1 or not 0 <= curriculum <= 1:
            raise OptionError(
                f"progress and curriculum must be fractions from 0 to 1, got progress={progress} and "
                f"curriculum={curriculum}."
            )
        # without a curriculum, the canvas has its full size from the first step
        ramp = min(1.0, progress / curriculum) if curriculum else 1.0
        grown = tuple(_grown(n, size, ramp) for n, size in zip(content, canvas, strict=True))
        offset = tuple(_offset(size - n, generator) for n, size in zip(content, grown, strict=True))
        return cls(content, grown, offset, fill)

    def _on_canvas(self, box: Box) -> Box:
        """Return a box of the content in patches of the canvas."""
        down, right = self.offset
        return box[0] + down, box[1] + right, box[2] + down, box[3] + right

    def _scale(self, values: Tensor, shape: Shape) -> int:
        """Return the number of values per patch and side."""
        h, w = values.shape[-2:] if values.ndim > 1 else (0, 0)
        s = h // shape[0]
        if not s or (h, w) != (shape[0] * s, shape[1] * s):
            name = "content" if shape == self.content else "canvas"
            raise ShapeError(
                f"Placement: the {name} has {shape} patches, got values of shape {tuple(values.shape)}. Use the same "
                "integer number of values per patch along both axes."
            )
        return s


def common_part(first: Placement, second: Placement) -> tuple[Placement, Placement]:
    """Return both placements with `box` set to the patches of the content visible in both.

    Example:
        >>> a, b = Placement((4, 4), (3, 3), (0, 0)), Placement((4, 4), (3, 3), (-1, 0))
        >>> common_part(a, b)[0].box
        (1, 0, 3, 3)

    Raises:
        OptionError: their contents differ in size, or no patch is visible in both.
    """
    box = _intersection(first.seen, second.seen)
    if first.content != second.content or _empty(box):
        raise OptionError(
            f"Placements need equal contents with patches visible in both, got {first} and {second}."
        )
    return replace(first, box=box), replace(second, box=box)


def _intersection(a: Box, b: Box) -> Box:
    return max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3])


def _empty(box: Box) -> bool:
    return box[0] >= box[2] or box[1] >= box[3]


def _crop(values: Tensor, box: Box, s: int) -> Tensor:
    return values[..., box[0] * s : box[2] * s, box[1] * s : box[3] * s]


def _reflected(values: Tensor, size: Shape, offset: Shape) -> Tensor:
    """Return a window of an image that is extended by reflection at its borders, with the image at `offset`."""
    for axis, length, start in zip((-2, -1), size, offset, strict=True):
        side = values.shape[axis]
        # symmetric reflection, which repeats the border values, so that patches stay aligned
        index = (torch.arange(length, device=values.device) - start) % (2 * side)
        values = values.index_select(axis, torch.minimum(index, 2 * side - 1 - index))
    return values


def _grown(content: int, canvas: int, ramp: float) -> int:
    """Return a side of the canvas after a fraction `ramp` of its growth, at least one patch."""
    difference = abs(canvas - content)
    step = min(difference, max(1, math.floor(difference * ramp)))
    # the canvas may also be smaller than the content
    return content + (step if canvas > content else -step)


def _offset(spare: int, generator: np.random.Generator) -> int:
    """Return a random offset at which the content is within the canvas, or the canvas within the content."""
    # spare < 0: the canvas is smaller and is moved within the content
    return int(generator.integers(min(0, spare), max(0, spare) + 1))
