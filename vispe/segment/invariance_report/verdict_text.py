"""The verdict of a trust report in the words of a microscopist."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_LEVELS = {"steady": "Steady", "mild": "Mild dependence", "strong": "Strong dependence"}
_MOVES = {
    "turned": "turned",
    "mirrored": "mirrored",
    "shifted": "shifted",
    "angles": "turned by other angles",
}


@dataclass(frozen=True, eq=False)
class Case:
    """The numbers and names that a verdict is made of.

    Attributes:
        names: of the K classes.
        fractions: (K,) area shares in per cent.
        families: F kinds of poses.
        spread: (F, K) what they change, in percentage points.
        floor: (F, K) what the measurement itself changes.
        levels: of each class: 'steady', 'mild' or 'strong'.
        level: of the picture.
        agreement: share of the pixels whose class is the same in all poses.
        at_borders: share of the changing pixels that lie along borders.
        inside: share of the pixels away from borders whose class changes.
        border: pixels along borders that count as border.
        compared: whether there is anything to speak of.
    """

    names: Sequence[str]
    fractions: np.ndarray
    families: Sequence[str]
    spread: np.ndarray
    floor: np.ndarray
    levels: Sequence[str]
    level: str
    agreement: float
    at_borders: float
    inside: float
    border: int
    compared: bool

    @property
    def effect(self) -> np.ndarray:
        """(F, K) the spread beyond the floor; 0 where it does not reach it."""
        return np.maximum(self.spread - self.floor, 0)


def points(value: float) -> str:
    """Return percentage points with two digits; '<0.01' for what is less and not 0."""
    if value == 0 or not np.isfinite(value):
        return "0" if value == 0 else "-"
    if abs(value) < 0.01:
        return "<0.01"
    return f"{value:.0f}" if abs(value) >= 10 else f"{value:.2g}"


def percent(share: float) -> str:
    """Return a share as per cent that never rounds to all or none of it."""
    value = 100 * share
    if value in (0, 100) or not np.isfinite(value):
        return f"{value:.0f} %" if np.isfinite(value) else "-"
    if value < 0.1 or value > 99.9:
        return "<0.1 %" if value < 0.1 else ">99.9 %"
    return f"{value:.1f} %"


def verdict(case: Case) -> str:
    """Return what the report says, in two or three sentences: the class that depends most, and the pixels."""
    if not case.compared:
        return "Nothing could be compared: the picture holds no data or is too small to be moved."
    moves = _listed([_MOVES[f] for f in case.families], "or")
    if not case.spread.any() and case.agreement == 1:
        return f"Steady: every pixel keeps its class when the picture is {moves}."
    k = worst_class(case)
    parts = [
        f"{points(spread)} when {_MOVES[f]} (floor {points(floor)})"
        for f, spread, floor in zip(case.families, case.spread[:, k], case.floor[:, k], strict=True)
    ]
    parts[0] = "by " + parts[0].replace(" when ", " percentage points when the picture is ", 1)
    if not case.effect.any():
        first = f"no fraction changes beyond the floor of the measurement when the picture is {moves}."
    else:
        own = points(case.fractions[k])
        first = f"the fraction of {case.names[k]} ({own} %) changes {_listed(parts, 'and')}."
    return f"{_LEVELS[case.level]}: {first} {_pixels(case)}"


def brief(case: Case) -> str:
    """Return the verdict in a few words, for one line."""
    if not case.compared:
        return "nothing to compare"
    k = worst_class(case)
    if case.level not in case.levels:
        return f"{case.level}, {percent(case.inside)} of pixels away from borders change"
    effect, spread = case.effect[:, k], case.spread[:, k]
    worst = max(range(len(case.families)), key=lambda f: (effect[f], spread[f]))
    if spread[worst] == 0:
        return f"{case.level}, {percent(case.agreement)} of pixels agree"
    floor = points(case.floor[worst, k])
    return f"{case.level}, {case.names[k]} by {points(spread[worst])} pp (floor {floor})"


def worst_class(case: Case) -> int:
    """Return the index of the class that depends most: by level, effect and spread; of equal ones the rarest."""
    order = list(_LEVELS)
    effect, spread = case.effect.max(0).round(6), case.spread.max(0).round(6)
    return max(
        range(len(case.names)),
        key=lambda k: (order.index(case.levels[k]), effect[k], spread[k], -case.fractions[k]),
    )


def _pixels(case: Case) -> str:
    """Return the sentence on pixels."""
    kept = f"{percent(case.agreement)} of the pixels keep their class in every pose"
    if case.agreement == 1:
        return f"{kept}."
    near = f"{percent(case.at_borders)} of the others lie within {case.border} px of a border between classes"
    if not np.isfinite(case.inside):
        return f"{kept}; {near}."
    return f"{kept}; {near}, and away from borders {percent(case.inside)} change."


def _listed(words: list[str], last: str) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"
