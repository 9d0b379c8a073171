"""What the trust report of one picture holds, and its sentence."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np

from vispe.segment.invariance_report import verdict_text
from vispe.segment.metrics import shares, without_borders

FAMILIES = ("turned", "mirrored", "shifted")
"""Kinds of poses that move pixels and make none."""

MILD, STRONG = 1.0, 5.0
"""Percentage points beyond the floor from which a fraction depends mildly, and strongly; they are our choice."""

MILD_SHARE, STRONG_SHARE, LEAST = 0.1, 0.5, 0.1
"""The same as a share of the fraction itself, for rare classes; counted from `LEAST` percentage points up."""

MILD_PIXELS, STRONG_PIXELS = 0.01, 0.1
"""Share of all pixels that change away from borders: fractions may stay the same while classes change places."""

Level = Literal["steady", "mild", "strong"]
LEVELS: tuple[Level, ...] = ("steady", "mild", "strong")


@dataclass(frozen=True, eq=False)
class Posed:
    """One pose, compared with the picture as it stands on the pixels that both show.

    Attributes:
        name: as in `vispe.evaluate.rotation`: 'rot90', 'hflip' ..., 'shift (8, -7) px', '15°'.
        family: 'turned', 'mirrored', 'shifted' or 'angles'.
        fractions: (K,) area share of each class in per cent.
        still: (K,) the same of the picture as it stands, on the same pixels.
        agreement: share of the pixels that keep their class.
        pixels: how many are compared.
    """

    name: str
    family: str
    fractions: np.ndarray
    still: np.ndarray
    agreement: float
    pixels: int

    @classmethod
    def compare(cls, name: str, family: str, still: np.ndarray, found: np.ndarray, n_classes: int) -> "Posed":
        """Compare two label maps on the pixels where both have a class."""
        both = (still > 0) & (found > 0)
        here, there = still[both], found[both]
        agreement = float((here == there).mean()) if here.size else float("nan")
        return cls(name, family, shares(there, n_classes), shares(here, n_classes), agreement, here.size)

    @property
    def change(self) -> np.ndarray:
        """(K,) change of the fractions in percentage points."""
        return self.fractions - self.still

    def to_dict(self, names: Sequence[str]) -> dict[str, Any]:
        """Return JSON values; fractions as shares from 0 to 1, as the rest of the report has them."""
        return {
            "name": self.name,
            "family": self.family,
            "fractions": _by_class(names, self.fractions / 100),
            "change_pp": _by_class(names, self.change),
            "agreement": _number(self.agreement),
            "pixels": self.pixels,
        }


@dataclass(frozen=True, eq=False)
class Trust:
    """Whether one segmentation depends on how the sample lies.

    Attributes:
        names: the K classes.
        labels: (h, w) uint8 as the picture stands: 1..K, 0 = no data.
        disagreement: (h, w) float32, 1 - share of the most frequent class over the poses that show the pixel; NaN = no
            data. From 0 (all agree) to 1 - 1/K.
        poses: all of them but the picture as it stands.
        controls: what the measurement itself changes: the picture once more, the picture without its rim, and for
            angles the picture turned there and back, and its labels turned.
        changed: for each family the pixels (h, w) bool whose class changes in one of its poses.
        border: pixels along borders between classes that count as border.
        notes: what the user should know.
    """

    names: tuple[str, ...]
    labels: np.ndarray
    disagreement: np.ndarray
    poses: tuple[Posed, ...]
    controls: tuple[Posed, ...]
    changed: dict[str, np.ndarray]
    border: int = 2
    notes: tuple[str, ...] = field(default=())

    @cached_property
    def fractions(self) -> np.ndarray:
        """(K,) area share of each class in per cent, as the picture stands."""
        return shares(self.labels, len(self.names))

    @property
    def families(self) -> tuple[str, ...]:
        """Those that were measured."""
        return tuple(dict.fromkeys(p.family for p in self.poses))

    def phase_spread(self, family: str) -> np.ndarray:
        """Return largest minus smallest fraction over a family and the picture as it stands, (K,), in points.

        At angles, where each is compared on pixels of its own, it is the largest change.
        """
        poses = [p for p in self.poses if p.family == family]
        changes = np.array([np.zeros(len(self.names)), *(p.change for p in poses)])
        return np.abs(changes).max(0) if family == "angles" else np.ptp(changes, axis=0)

    def floor(self, family: str) -> np.ndarray:
        """Return what the measurement itself changes, (K,), in percentage points; at least one pixel."""
        wanted = "turned" if family == "mirrored" else family
        controls = [p for p in self.controls if p.family == wanted]
        pixel = 100 / max(min(p.pixels for p in self.poses if p.family == family), 1)
        return np.array([np.full(len(self.names), pixel), *(np.abs(p.change) for p in controls)]).max(0)

    def effect(self, family: str) -> np.ndarray:
        """Return the spread beyond the floor, (K,), in percentage points; 0 where it does not reach it."""
        return np.maximum(self.phase_spread(family) - self.floor(family), 0)

    @cached_property
    def levels(self) -> tuple[Level, ...]:
        """How each class depends on the pose, by the largest effect over the families."""
        effect = np.max([np.zeros(len(self.names)), *(self.effect(f) for f in self.families)], axis=0)
        own = np.where(self.fractions > 0, effect / np.maximum(self.fractions, 1e-9), 0) * (effect >= LEAST)
        return tuple(
            LEVELS[max(_rank(e, MILD, STRONG), _rank(s, MILD_SHARE, STRONG_SHARE))]
            for e, s in zip(effect, own, strict=True)
        )

    @property
    def pixel_level(self) -> Level:
        """How the map depends on the pose, by the pixels that change away from borders."""
        share = _share((self.disagreement > 0) & self.inner, self.labels > 0)
        return LEVELS[_rank(share, MILD_PIXELS, STRONG_PIXELS)]

    @property
    def level(self) -> Level:
        """That of the class that depends most, or of the pixels."""
        return max((*self.levels, self.pixel_level), key=LEVELS.index)

    def _largest(self, of: Callable[[str], np.ndarray]) -> np.ndarray:
        """Return the value of each class in the family in which its fraction spreads most beyond the floor, (K,)."""
        over = np.array([self.phase_spread(f) - self.floor(f) for f in self.families])
        if not len(over):
            return np.full(len(self.names), np.nan)
        return np.array([of(f) for f in self.families])[over.argmax(0), np.arange(len(self.names))]

    @property
    def agreement(self) -> float:
        """Share of the pixels with data whose class is the same in all poses."""
        return 1 - _share(self.disagreement > 0, self.labels > 0)

    @cached_property
    def inner(self) -> np.ndarray:
        """(h, w) bool: pixels further than `border` from any border between classes, as the picture stands."""
        return without_borders(self.labels, self.border) > 0

    @property
    def at_borders(self) -> float:
        """Share of the changing pixels that lie along borders between classes; NaN when none changes."""
        return _share(~self.inner, self.disagreement > 0)

    @property
    def inside(self) -> float:
        """Share of the pixels away from borders whose class changes; NaN when all lie along borders."""
        return _share(self.disagreement > 0, self.inner)

    @cached_property
    def _case(self) -> verdict_text.Case:
        """The numbers and names that the words are made of."""
        return verdict_text.Case(
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
        """What the report says, in two or three sentences."""
        return verdict_text.verdict(self._case)

    @cached_property
    def brief(self) -> str:
        """The verdict in a few words."""
        return verdict_text.brief(self._case)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values; what is not known is None."""
        families = self.families
        classes = {
            name: {
                "fraction": _number(self.fractions[k] / 100),
                "dependence": self.levels[k],
                "spread_pp": {f: _number(self.phase_spread(f)[k]) for f in families},
                "floor_pp": {f: _number(self.floor(f)[k]) for f in families},
            }
            for k, name in enumerate(self.names)
        }
        data = self.labels > 0
        by_family = {f: _number(1 - _share(c, data)) for f, c in self.changed.items()}
        return {
            "verdict": self.verdict,
            "brief": self.brief,
            "dependence": self.level,
            "spread_pp": _by_class(self.names, self._largest(self.phase_spread)),
            "floor_pp": _by_class(self.names, self._largest(self.floor)),
            "agreement": _number(self.agreement),
            "agreement_by_family": by_family,
            "border_px": self.border,
            "border_share": _number(1 - _share(self.inner, data)),
            "changes_at_borders": _number(self.at_borders),
            "inside_changed": _number(self.inside),
            "mean_disagreement": _number(_share(self.disagreement, data)),
            "classes": classes,
            "poses": [p.to_dict(self.names) for p in self.poses],
            "controls": [p.to_dict(self.names) for p in self.controls],
            "notes": list(self.notes),
        }


def _share(what: np.ndarray, of: np.ndarray) -> float:
    return float(what[of].mean()) if of.any() else float("nan")


def _rank(value: float, mild: float, strong: float) -> int:
    return int(value >= mild) + int(value >= strong)


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _by_class(names: Sequence[str], values: np.ndarray) -> dict[str, float | None]:
    return {name: _number(v) for name, v in zip(names, values, strict=True)}
