"""Verdict of a trust report as text."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_LEVELS = {"steady": "Steady", "mild": "Mild dependence", "strong": "Strong dependence"}
MOVES = {
    "turned": "rotated",
    "mirrored": "mirrored",
    "shifted": "shifted",
    "angles": "rotated by other angles",
}
"""Words for the families of poses."""


@dataclass(frozen=True, eq=False)
class VerdictData:
    """Numbers and names of a verdict.

    Attributes:
        names: names of the K classes.
        fractions: (K,) areas in percent.
        families: F kinds of poses.
        spread: (F, K) their effect on the fractions, in percentage points.
        floor: (F, K) noise floor of the measurement.
        levels: 'steady', 'mild' or 'strong' for each class.
        level: verdict level of the image.
        agreement: fraction of the pixels whose class is the same in all poses.
        at_borders: fraction of the changing pixels that are along borders.
        inside: fraction of the pixels away from borders whose class changes.
        border: half width in pixels of the border zone.
        compared: whether any pixels and poses were compared.
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
        """(F, K) spread beyond the noise floor; 0 below it."""
        return np.maximum(self.spread - self.floor, 0)


def format_points(value: float) -> str:
    """Format percentage points with two digits; '<0.01' for smaller values above 0."""
    if value == 0 or not np.isfinite(value):
        return "0" if value == 0 else "-"
    if abs(value) < 0.01:
        return "<0.01"
    return f"{value:.0f}" if abs(value) >= 10 else f"{value:.2g}"


def format_percent(fraction: float) -> str:
    """Format a fraction as percent, never rounded to 0 or 100."""
    value = 100 * fraction
    if value in (0, 100) or not np.isfinite(value):
        return f"{value:.0f} %" if np.isfinite(value) else "-"
    if value < 0.1 or value > 99.9:
        return "<0.1 %" if value < 0.1 else ">99.9 %"
    return f"{value:.1f} %"


def verdict(case: VerdictData) -> str:
    """Return the summary in two or three sentences: the class that depends most, and the pixels."""
    if not case.compared:
        return "Nothing could be compared: the image has no data or is too small to be shifted."
    moves = _listed([MOVES[f] for f in case.families], "or")
    if not case.spread.any() and case.agreement == 1:
        return f"Steady: no pixel changes its class when the image is {moves}."
    k = worst_class(case)
    parts = [
        f"{format_points(spread)} when {MOVES[f]} (floor {format_points(floor)})"
        for f, spread, floor in zip(case.families, case.spread[:, k], case.floor[:, k], strict=True)
    ]
    parts[0] = "by " + parts[0].replace(" when ", " percentage points when the image is ", 1)
    if not case.effect.any():
        first = f"no fraction changes beyond the floor of the measurement when the image is {moves}."
    else:
        fraction_text = format_points(case.fractions[k])
        first = f"the fraction of {case.names[k]} ({fraction_text} %) changes {_listed(parts, 'and')}."
    return f"{_LEVELS[case.level]}: {first} {_pixels(case)}"


def brief(case: VerdictData) -> str:
    """Return the summary in a few words, for one line."""
    if not case.compared:
        return "nothing to compare"
    k = worst_class(case)
    if case.level not in case.levels:
        return f"{case.level}, {format_percent(case.inside)} of pixels away from borders change"
    effect, spread = case.effect[:, k], case.spread[:, k]
    worst = max(range(len(case.families)), key=lambda f: (effect[f], spread[f]))
    if spread[worst] == 0:
        return f"{case.level}, {format_percent(case.agreement)} of pixels agree"
    floor = format_points(case.floor[worst, k])
    return f"{case.level}, {case.names[k]} by {format_points(spread[worst])} pp (floor {floor})"


def worst_class(case: VerdictData) -> int:
    """Return the index of the class that depends most: by level, effect and spread; the rarest of equal ones."""
    order = list(_LEVELS)
    effect, spread = case.effect.max(0).round(6), case.spread.max(0).round(6)
    return max(
        range(len(case.names)),
        key=lambda k: (order.index(case.levels[k]), effect[k], spread[k], -case.fractions[k]),
    )


def _pixels(case: VerdictData) -> str:
    unchanged = f"{format_percent(case.agreement)} of the pixels have the same class in every pose"
    if case.agreement == 1:
        return f"{unchanged}."
    at_borders = (
        f"{format_percent(case.at_borders)} of the others are within {case.border} px of a class border"
    )
    if not np.isfinite(case.inside):
        return f"{unchanged}; {at_borders}."
    return f"{unchanged}; {at_borders}, and away from borders {format_percent(case.inside)} change."


def _listed(items: list[str], last: str) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} {last} {items[-1]}"
