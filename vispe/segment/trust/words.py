"""The verdict of a trust report in the words of a microscopist."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from vispe.segment.trust.result import Trust

_LEVELS = {"steady": "Steady", "mild": "Mild dependence", "strong": "Strong dependence"}
_MOVES = {
    "turned": "turned",
    "mirrored": "mirrored",
    "shifted": "shifted",
    "angles": "turned by other angles",
}


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


def verdict(trust: Trust) -> str:
    """Return what the report says, in two or three sentences: the class that depends most, and the pixels."""
    families = trust.families
    if not families or not (trust.labels > 0).any():
        return "Nothing could be compared: the picture holds no data or is too small to be moved."
    moves = _listed([_MOVES[f] for f in families], "or")
    spread = np.array([trust.phase_spread(f) for f in families])
    if not spread.any() and trust.agreement == 1:
        return f"Steady: every pixel keeps its class when the picture is {moves}."
    k = worst_class(trust)
    said = [
        f"{'by ' if i == 0 else ''}{points(spread[i, k])} {'percentage points ' if i == 0 else ''}when "
        f"{'the picture is ' if i == 0 else ''}{_MOVES[f]} (floor {points(trust.floor(f)[k])})"
        for i, f in enumerate(families)
    ]
    if not any(trust.effect(f).any() for f in families):
        first = f"no fraction changes beyond the floor of the measurement when the picture is {moves}."
    else:
        own = points(trust.fractions[k])
        first = f"the fraction of {trust.names[k]} ({own} %) changes {_listed(said, 'and')}."
    return f"{_LEVELS[trust.level]}: {first} {_pixels(trust)}"


def brief(trust: Trust) -> str:
    """Return the verdict in a few words, for one line."""
    if not trust.families or not (trust.labels > 0).any():
        return "nothing to compare"
    k = worst_class(trust)
    if trust.level not in trust.levels:
        return f"{trust.level}, {percent(trust.inside)} of pixels away from borders change"
    family = max(trust.families, key=lambda f: (trust.effect(f)[k], trust.phase_spread(f)[k]))
    spread, floor = trust.phase_spread(family)[k], trust.floor(family)[k]
    if spread == 0:
        return f"{trust.level}, {percent(trust.agreement)} of pixels agree"
    return f"{trust.level}, {trust.names[k]} by {points(spread)} pp (floor {points(floor)})"


def worst_class(trust: Trust) -> int:
    """Return the index of the class that depends most: by level, effect and spread; of equal ones the rarest."""
    order = {level: k for k, level in enumerate(_LEVELS)}
    effect = np.max([trust.effect(f) for f in trust.families], axis=0).round(6)
    spread = np.max([trust.phase_spread(f) for f in trust.families], axis=0).round(6)
    keys = [
        (order[trust.levels[k]], effect[k], spread[k], -trust.fractions[k]) for k in range(len(trust.names))
    ]
    return max(range(len(keys)), key=keys.__getitem__)


def _pixels(trust: Trust) -> str:
    """Return the sentence on pixels."""
    kept = f"{percent(trust.agreement)} of the pixels keep their class in every pose"
    if trust.agreement == 1:
        return f"{kept}."
    away = percent(trust.inside) if np.isfinite(trust.inside) else None
    where = (
        f"{percent(trust.at_borders)} of the others lie within {trust.border} px of a border between classes"
    )
    if away is None:
        return f"{kept}; {where}."
    return f"{kept}; {where}, and away from borders {away} change."


def _listed(words: list[str], last: str) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"
