"""Result of the invariance measurement of one image, and its verdict."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np

from vispe.segment.invariance_report import verdict_text
from vispe.segment.invariance_report.pose_result import PoseResult, by_class, known_number
from vispe.segment.metrics import class_percentages, without_borders

MILD, STRONG = 1.0, 5.0
"""Percentage points beyond the noise floor that define mild and strong dependence; chosen by convention."""

MILD_SHARE, STRONG_SHARE, LEAST = 0.1, 0.5, 0.1
"""The same relative to the fraction itself, for rare classes; applied from `LEAST` percentage points."""

MILD_PIXELS, STRONG_PIXELS = 0.01, 0.1
"""Fraction of all pixels that change away from borders: area fractions may be equal while classes swap positions."""

Level = Literal["steady", "mild", "strong"]
LEVELS: tuple[Level, ...] = ("steady", "mild", "strong")


@dataclass(frozen=True, eq=False)
class InvarianceReport:
    """Invariance of one segmentation to the pose of the sample.

    Attributes:
        names: the K classes.
        labels: (h, w) uint8 of the unmodified image: 1..K, 0 = no data.
        disagreement: (h, w) float32, 1 - fraction of the most frequent class over the poses that show the pixel; NaN =
            no data. From 0 (all agree) to 1 - 1/K.
        poses: all poses except the identity.
        controls: poses that measure the noise floor: the unmodified image again, the image without its margin, and for
            angles the image rotated forth and back, and its labels rotated.
        changed: pixels (h, w) bool whose class changes in any pose of a family, by family.
        border: half width in pixels of the border zone between classes.
        notes: messages for the user.
    """

    names: tuple[str, ...]
    labels: np.ndarray
    disagreement: np.ndarray
    poses: tuple[PoseResult, ...]
    controls: tuple[PoseResult, ...]
    changed: dict[str, np.ndarray]
    border: int = 2
    notes: tuple[str, ...] = field(default=())

    @cached_property
    def fractions(self) -> np.ndarray:
        """(K,) area of each class of the unmodified image, in percent."""
        return class_percentages(self.labels, len(self.names))

    @property
    def families(self) -> tuple[str, ...]:
        """Families that were measured."""
        return tuple(dict.fromkeys(p.family for p in self.poses))

    def phase_spread(self, family: str) -> np.ndarray:
        """Return the range of each fraction over a family and the unmodified image, (K,), in percentage points.

        For the family of angles, the result is the largest change, since each angle is compared on different pixels.
        """
        poses = [p for p in self.poses if p.family == family]
        changes = np.array([np.zeros(len(self.names)), *(p.change for p in poses)])
        return np.abs(changes).max(0) if family == "angles" else np.ptp(changes, axis=0)

    def floor(self, family: str) -> np.ndarray:
        """Return the noise floor of each class, (K,), in percentage points; at least one pixel."""
        control_family = "turned" if family == "mirrored" else family
        controls = [p for p in self.controls if p.family == control_family]
        pixel = 100 / max(min(p.pixels for p in self.poses if p.family == family), 1)
        return np.array([np.full(len(self.names), pixel), *(np.abs(p.change) for p in controls)]).max(0)

    def effect(self, family: str) -> np.ndarray:
        """Return the spread beyond the noise floor, (K,), in percentage points; 0 below it."""
        return np.maximum(self.phase_spread(family) - self.floor(family), 0)

    @cached_property
    def levels(self) -> tuple[Level, ...]:
        """Dependence of each class on the pose, by the largest effect over the families."""
        # largest effect over the families, absolute and relative to the fraction
        effect = np.max([np.zeros(len(self.names)), *(self.effect(f) for f in self.families)], axis=0)
        relative_effect = np.where(self.fractions > 0, effect / np.maximum(self.fractions, 1e-9), 0) * (
            effect >= LEAST
        )
        return tuple(
            LEVELS[max(_rank(e, MILD, STRONG), _rank(s, MILD_SHARE, STRONG_SHARE))]
            for e, s in zip(effect, relative_effect, strict=True)
        )

    @property
    def pixel_level(self) -> Level:
        """Dependence of the map on the pose, by the pixels that change away from borders."""
        fraction = _fraction_of((self.disagreement > 0) & self.inner, self.labels > 0)
        return LEVELS[_rank(fraction, MILD_PIXELS, STRONG_PIXELS)]

    @property
    def level(self) -> Level:
        """Highest level of dependence among all classes and the pixels."""
        return max((*self.levels, self.pixel_level), key=LEVELS.index)

    def _largest(self, of: Callable[[str], np.ndarray]) -> np.ndarray:
        """Return the value of each class in the family with its largest spread beyond the floor, (K,)."""
        over = np.array([self.phase_spread(f) - self.floor(f) for f in self.families])
        if not len(over):
            return np.full(len(self.names), np.nan)
        return np.array([of(f) for f in self.families])[over.argmax(0), np.arange(len(self.names))]

    @property
    def agreement(self) -> float:
        """Fraction of the pixels with data whose class is the same in all poses."""
        return 1 - _fraction_of(self.disagreement > 0, self.labels > 0)

    @cached_property
    def inner(self) -> np.ndarray:
        """(h, w) bool: pixels of the unmodified image more than `border` away from any class border."""
        return without_borders(self.labels, self.border) > 0

    @property
    def at_borders(self) -> float:
        """Fraction of the changing pixels that are along class borders; NaN without changes."""
        return _fraction_of(~self.inner, self.disagreement > 0)

    @property
    def inside(self) -> float:
        """Fraction of the pixels away from borders whose class changes; NaN if all are along borders."""
        return _fraction_of(self.disagreement > 0, self.inner)

    @cached_property
    def _case(self) -> verdict_text.VerdictData:
        return verdict_text.VerdictData(
            names=self.names,
            fractions=self.fractions,
            families=self.families,
            spread=np.array([self.phase_spread(f) for f in self.families]),
            floor=np.array([self.floor(f) for f in self.families]),
            levels=self.levels,
            level=self.level,
            agreement=self.agreement,
            at_borders=self.at_borders,
            inside=self.inside,
            border=self.border,
            compared=bool(self.families) and bool((self.labels > 0).any()),
        )

    @cached_property
    def verdict(self) -> str:
        """Summary in two or three sentences."""
        return verdict_text.verdict(self._case)

    @cached_property
    def brief(self) -> str:
        """Summary in a few words."""
        return verdict_text.brief(self._case)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values; unknown ones are None."""
        families = self.families
        classes = {
            name: {
                "fraction": known_number(self.fractions[k] / 100),
                "dependence": self.levels[k],
                "spread_pp": {f: known_number(self.phase_spread(f)[k]) for f in families},
                "floor_pp": {f: known_number(self.floor(f)[k]) for f in families},
            }
            for k, name in enumerate(self.names)
        }
        data = self.labels > 0
        by_family = {f: known_number(1 - _fraction_of(c, data)) for f, c in self.changed.items()}
        return {
            "verdict": self.verdict,
            "brief": self.brief,
            "dependence": self.level,
            "spread_pp": by_class(self.names, self._largest(self.phase_spread)),
            "floor_pp": by_class(self.names, self._largest(self.floor)),
            "agreement": known_number(self.agreement),
            "agreement_by_family": by_family,
            "border_px": self.border,
            "border_share": known_number(1 - _fraction_of(self.inner, data)),
            "changes_at_borders": known_number(self.at_borders),
            "inside_changed": known_number(self.inside),
            "mean_disagreement": known_number(_fraction_of(self.disagreement, data)),
            "classes": classes,
            "poses": [p.to_dict(self.names) for p in self.poses],
            "controls": [p.to_dict(self.names) for p in self.controls],
            "notes": list(self.notes),
        }


def _fraction_of(mask: np.ndarray, selection: np.ndarray) -> float:
    return float(mask[selection].mean()) if selection.any() else float("nan")


def _rank(value: float, mild: float, strong: float) -> int:
    return int(value >= mild) + int(value >= strong)
