"""Pixel-exact poses of an image: rotations, reflections, shifts, and their controls.

A pose acts on the last two axes and has the attributes `name` and `family`. `undo` maps labels back to the
frame of the image; pixels that the pose does not show get the label 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vispe.errors import OptionError
from vispe.images.symmetry.d4 import D4, Element

Shift = tuple[int, int]


@dataclass(frozen=True)
class SquareSymmetry:
    """A symmetry of the square: a rotation by a multiple of 90 degrees, or a reflection.

    Attributes:
        element: element of D4.
    """

    element: Element

    @property
    def name(self) -> str:
        """Name of the element."""
        return self.element.name

    @property
    def family(self) -> str:
        """'mirrored' or 'turned'."""
        return "mirrored" if self.element.flip else "turned"

    def apply(self, values: np.ndarray) -> np.ndarray:
        """Return the transformed image (..., h, w)."""
        return self.element.apply(values)

    def undo(self, labels: np.ndarray) -> np.ndarray:
        """Return labels (h, w) in the frame of the image."""
        return self.element.undo(labels)


@dataclass(frozen=True)
class ShiftedFrame:
    """Shift of the image in its frame, `dy` pixels down and `dx` right; the new strip is filled by reflection.

    The frame has the same size, so patches and tiles have the same positions, with other parts of the sample in them.
    """

    dy: int
    dx: int
    family = "shifted"

    @property
    def name(self) -> str:
        """'shift (dy, dx) px'."""
        return f"shift ({self.dy}, {self.dx}) px"

    def apply(self, values: np.ndarray) -> np.ndarray:
        """Return the shifted image (..., h, w)."""
        pads = [(0, 0)] * (values.ndim - 2) + [(max(d, 0), max(-d, 0)) for d in (self.dy, self.dx)]
        top, left = max(-self.dy, 0), max(-self.dx, 0)
        h, w = values.shape[-2:]
        return np.pad(values, pads, mode="symmetric")[..., top : top + h, left : left + w].copy()

    def undo(self, labels: np.ndarray) -> np.ndarray:
        """Return labels (h, w) shifted back; 0 in the strip that left the frame."""
        out = np.zeros_like(labels)
        h, w = labels.shape
        rows, columns = (slice(max(-d, 0), n - max(d, 0)) for d, n in ((self.dy, h), (self.dx, w)))
        moved = (slice(max(self.dy, 0), h + min(self.dy, 0)), slice(max(self.dx, 0), w + min(self.dx, 0)))
        out[rows, columns] = labels[moved]
        return out


@dataclass(frozen=True)
class ShiftMargin:
    """The unshifted image without the strips that shifts lose: the control of the shifts.

    Attributes:
        top: number of rows at the top that are replaced by their reflected neighbours.
        bottom: the same for rows at the bottom.
        left: the same for columns at the left.
        right: the same for columns at the right.
    """

    top: int
    bottom: int
    left: int
    right: int
    family = "shifted"
    name = "rim cut"

    @classmethod
    def of(cls, shifts: Sequence[Shift]) -> "ShiftMargin":
        """Return the union of the strips that shifts (dy, dx) lose."""
        dy, dx = zip(*shifts, strict=True)
        return cls(-min(*dy, 0), max(*dy, 0), -min(*dx, 0), max(*dx, 0))

    def frame(self, h: int, w: int) -> np.ndarray:
        """Return the pixels (h, w) bool that are visible in every shift."""
        inside = np.zeros((h, w), bool)
        inside[self.top : h - self.bottom, self.left : w - self.right] = True
        return inside

    def apply(self, values: np.ndarray) -> np.ndarray:
        """Return the image (..., h, w) with a reflected margin."""
        h, w = values.shape[-2:]
        pads = [(0, 0)] * (values.ndim - 2) + [(self.top, self.bottom), (self.left, self.right)]
        return np.pad(
            values[..., self.top : h - self.bottom, self.left : w - self.right], pads, mode="symmetric"
        )

    def undo(self, labels: np.ndarray) -> np.ndarray:
        """Return the labels (h, w) inside the margin; 0 in it."""
        return np.where(self.frame(*labels.shape), labels, 0)


Move = SquareSymmetry | ShiftedFrame | ShiftMargin

REPEAT = SquareSymmetry(D4[0])
"""The unmodified image again: the control of rotations and reflections."""


def valid_shifts(shifts: Sequence[Shift], shape: tuple[int, int]) -> list[Shift]:
    """Return the distinct shifts other than (0, 0) that do not exceed a quarter of either side.

    Raises:
        OptionError: not pairs of integers.
    """
    for shift in shifts:
        if len(shift) != 2 or not all(isinstance(d, int) for d in shift):
            raise OptionError(f"A shift must be two integers, pixels (down, right), got {shift!r}.")
    most = np.array(shape) // 4
    return [s for s in dict.fromkeys(shifts) if s != (0, 0) and (np.abs(s) <= most).all()]
