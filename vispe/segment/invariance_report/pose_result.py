"""Comparison of one pose with the unmodified image."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vispe.segment.metrics import class_percentages

FAMILIES = ("turned", "mirrored", "shifted")
"""Kinds of pixel-exact poses."""


@dataclass(frozen=True, eq=False)
class PoseResult:
    """Comparison of one pose with the unmodified image, on the pixels visible in both.

    Attributes:
        name: name of the pose, as in `vispe.evaluate.rotation`: 'rot90', 'hflip' ..., 'shift (8, -7) px', '15°'.
        family: 'turned', 'mirrored', 'shifted' or 'angles'.
        fractions: (K,) area of each class in percent.
        reference: (K,) the same for the unmodified image, on the same pixels.
        agreement: fraction of the pixels with an unchanged class.
        pixels: number of compared pixels.
    """

    name: str
    family: str
    fractions: np.ndarray
    reference: np.ndarray
    agreement: float
    pixels: int

    @classmethod
    def compare(
        cls, name: str, family: str, reference: np.ndarray, labels: np.ndarray, n_classes: int
    ) -> "PoseResult":
        """Compare two label maps on the pixels with a class in both."""
        both = (reference > 0) & (labels > 0)
        before, after = reference[both], labels[both]
        agreement = float((before == after).mean()) if before.size else float("nan")
        return cls(
            name,
            family,
            class_percentages(after, n_classes),
            class_percentages(before, n_classes),
            agreement,
            before.size,
        )

    @property
    def change(self) -> np.ndarray:
        """(K,) change of the fractions in percentage points."""
        return self.fractions - self.reference

    def to_dict(self, names: Sequence[str]) -> dict[str, Any]:
        """Return JSON values; fractions in [0, 1], as in the rest of the report."""
        return {
            "name": self.name,
            "family": self.family,
            "fractions": by_class(names, self.fractions / 100),
            "change_pp": by_class(names, self.change),
            "agreement": known_number(self.agreement),
            "pixels": self.pixels,
        }


def known_number(value: float) -> float | None:
    """Return a number for JSON, None if it is not finite."""
    return float(value) if np.isfinite(value) else None


def by_class(names: Sequence[str], values: np.ndarray) -> dict[str, float | None]:
    """Return values (K,) by class name, None for those that are not finite."""
    return {name: known_number(v) for name, v in zip(names, values, strict=True)}
