"""When a number means yes: its interval against its controls, with one table of limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from vispe.evaluate.audit.measure import Outcome
from vispe.report.statistics import FEWEST

Verdict = Literal["yes", "no", "not decided"]

DRAWS = 1000

LIMITS: dict[str, float] = {
    # by how much a number must exceed its largest control; all of them ours: what random weights without an encoding
    # stay below, and what a person would call an effect
    "probe": 0.1,
    "pattern": 0.05,
    "neighbours": 0.05,
    "spectrum": 0.1,
    "channels": 0.02,
    "read_or_used": 0.2,
    "heads": 0.1,
    "place_in_logits": 0.05,
    "bands": 0.2,
    "prior": 0.1,
    "mask": 0.1,
    "shift": 0.05,
    "turn": 0.15,
    "strips": 0.05,
    "order": 0.1,
    "sides": 0.1,
    "crop": 0.01,
}
OTHER = 0.05  # for measures that are not on the page by default


@dataclass(frozen=True)
class Judged:
    """What an outcome is worth beside its controls.

    Attributes:
        interval: 95 % of the value; None with fewer than 5 units.
        margin: 95 % of the value minus its largest control; None likewise.
        verdict: yes, no or not decided.
    """

    interval: tuple[float, float] | None
    margin: tuple[float, float] | None
    verdict: Verdict


def limit(name: str) -> float:
    """Return by how much the number of a measure must exceed its controls to mean yes."""
    return LIMITS.get(name, OTHER)


def draws(outcome: Outcome, seed: int = 0) -> np.ndarray | None:
    """Return the value for 1,000 draws of units with replacement; None with fewer than 5 units.

    Two outcomes with as many units draw the same ones, so that their difference is that of pairs.
    """
    if outcome.n < FEWEST:
        return None
    picks = np.random.default_rng(seed).integers(0, outcome.n, (DRAWS, outcome.n))
    return outcome.drawn(picks)


def judge(name: str, outcome: Outcome, controls: dict[str, Outcome], seed: int = 0) -> Judged:
    """Return interval and verdict of an outcome.

    Args:
        name: of the measure.
        outcome: of the model.
        controls: outcomes of the other passes, by name; closed forms are in `outcome.control`.
        seed: of the draws.
    """
    values = draws(outcome, seed)
    if values is None or not np.isfinite(outcome.value):
        return Judged(None, None, "not decided")
    # the largest control counts, each drawn with the images of the model where they are the same ones
    others = [np.full(DRAWS, c) for c in outcome.control.values() if np.isfinite(c)]
    for control in controls.values():
        drawn = draws(control, seed)
        if np.isfinite(control.value):
            others.append(np.full(DRAWS, control.value) if drawn is None else drawn)
    if not others:  # a number alone says nothing
        return Judged(ends(values), None, "not decided")
    margin = ends(values - np.max(others, axis=0))
    least = limit(name)
    verdict: Verdict = "yes" if margin[0] > least else "no" if margin[1] < least else "not decided"
    return Judged(ends(values), margin, verdict)


def ends(values: np.ndarray) -> tuple[float, float]:
    """Return the ends of the middle 95 % of values."""
    low, high = np.nanpercentile(values, [2.5, 97.5])
    return float(low), float(high)
