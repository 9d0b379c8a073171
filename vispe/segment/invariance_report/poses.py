"""Ways to lay a picture down, by moving pixels alone: turned, mirrored, shifted, and controls beside them.

A move acts on the last two axes and has the attributes `name` and `family`. `undo` brings labels back into the frame of
the picture; they are 0 where the moved picture did not show it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vispe.errors import OptionError
from vispe.symmetry.d4 import D4, Element

Shift = tuple[int, int]


@dataclass(frozen=True)
class Lay:
    """A symmetry of the square: turned by quarters, or mirrored.

    Attributes:
        element: of D4.
    """

    element: Element

    @property
    def name(self) -> str:
        """As D4 calls it."""
        return self.element.name

    @property
    def family(self) -> str:
        """'mirrored' or 'turned'."""
        return "mirrored" if self.element.flip else "turned"

    def apply(self, values: np.ndarray) -> np.ndarray:
        """Return the picture (..., h, w) as the element moves it."""
        return self.element.apply(values)

    def undo(self, labels: np.ndarray) -> np.ndarray:
        """Return labels (h, w) in the frame of the picture."""
        return self.element.undo(labels)


@dataclass(frozen=True)
class Moved:
    """The picture moved in its frame by `dy` pixels down and `dx` right; the strip that comes in is mirrored.

    The frame keeps its size, so patches and tiles lie where they lay, and the sample lies elsewhere under them.
    """

    dy: int
    dx: int
    family = "shifted"

    @property
    def name(self) -> str:
        """'shift (dy, dx) px'."""
        return f"shift ({self.dy}, {self.dx}) px"

    def apply(self, values: np.ndarray) -> np.ndarray:
        """Return the moved picture (..., h, w)."""
        pads = [(0, 0)] * (values.ndim - 2) + [(max(d, 0), max(-d, 0)) for d in (self.dy, self.dx)]
        top, left = max(-self.dy, 0), max(-self.dx, 0)
        h, w = values.shape[-2:]
        return np.pad(values, pads, mode="symmetric")[..., top : top + h, left : left + w].copy()

    def undo(self, labels: np.ndarray) -> np.ndarray:
        """Return labels (h, w) moved back; 0 in the strip that went out of the frame."""
        out = np.zeros_like(labels)
        h, w = labels.shape
        rows, columns = (slice(max(-d, 0), n - max(d, 0)) for d, n in ((self.dy, h), (self.dx, w)))
        moved = (slice(max(self.dy, 0), h + min(self.dy, 0)), slice(max(self.dx, 0), w + min(self.dx, 0)))
        out[rows, columns] = labels[moved]
        return out


@dataclass(frozen=True)
class Rim:
    """The picture unmoved, without the strips that shifts take away: the control of the shifts.

    Attributes:
        top: rows that are replaced by the mirrored ones beside them; the other sides likewise.
    """

    top: int
    bottom: int
    left: int
    right: int
    family = "shifted"
    name = "rim cut"

    @classmethod
    def of(cls, shifts: Sequence[Shift]) -> "Rim":
        """Return the strips that shifts (dy, dx) take away, all of them together."""
        dy, dx = zip(*shifts, strict=True)
        return cls(-min(*dy, 0), max(*dy, 0), -min(*dx, 0), max(*dx, 0))

    def frame(self, h: int, w: int) -> np.ndarray:
        """Return the pixels (h, w) bool that every shift shows."""
        inside = np.zeros((h, w), bool)
        inside[self.top : h - self.bottom, self.left : w - self.right] = True
        return inside

    def apply(self, values: np.ndarray) -> np.ndarray:
        """Return the picture (..., h, w) with a mirrored rim."""
        h, w = values.shape[-2:]
        pads = [(0, 0)] * (values.ndim - 2) + [(self.top, self.bottom), (self.left, self.right)]
        return np.pad(
            values[..., self.top : h - self.bottom, self.left : w - self.right], pads, mode="symmetric"
        )

    def undo(self, labels: np.ndarray) -> np.ndarray:
        """Return the labels (h, w) inside the rim; 0 on it."""
        return np.where(self.frame(*labels.shape), labels, 0)


Move = Lay | Moved | Rim

REPEAT = Lay(D4[0])
"""The picture as it stands, once more: the control of turned and mirrored."""


def fitting(shifts: Sequence[Shift], shape: tuple[int, int]) -> list[Shift]:
    """Return the shifts that leave at least half of either side in common, and are not (0, 0).

    Raises:
        OptionError: not pairs of whole numbers.
    """
    for shift in shifts:
        if len(shift) != 2 or not all(isinstance(d, int) for d in shift):
            raise OptionError(f"A shift is two whole numbers of pixels (down, right), got {shift!r}.")
    most = np.array(shape) // 4
    return [s for s in dict.fromkeys(shifts) if s != (0, 0) and (np.abs(s) <= most).all()]
