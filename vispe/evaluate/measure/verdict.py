"""Verdicts: bootstrap intervals of a value minus its largest control, against a limit per measure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from vispe.evaluate.measure.base import Outcome
from vispe.utils.report.statistics import MIN_IMAGES

Verdict = Literal["yes", "no", "not decided"]

DRAWS = 1000


@dataclass(frozen=True)
class Judgement:
    """Intervals and verdict of an outcome.

    Attributes:
        interval: 95 % confidence interval of the value; None for fewer than 5 units.
        margin: 95 % confidence interval of the value minus its largest control; None for fewer than 5 units.
        verdict: yes, no or not decided.
    """

    interval: tuple[float, float] | None
    margin: tuple[float, float] | None
    verdict: Verdict


def draws(outcome: Outcome, seed: int = 0) -> np.ndarray | None:
    """Return the value for 1,000 bootstrap draws of units; None for fewer than 5 units.

    Outcomes with equal numbers of units use the same draws, so that their differences are paired.
    """
    if outcome.n < MIN_IMAGES:
        return None
    picks = np.random.default_rng(seed).integers(0, outcome.n, (DRAWS, outcome.n))
    return outcome.drawn(picks)


def judge(limit: float, outcome: Outcome, controls: dict[str, Outcome], seed: int = 0) -> Judgement:
    """Return intervals and verdict of an outcome.

    Args:
        limit: `limit` of the measure.
        outcome: outcome of the run of the model itself.
        controls: outcomes of the control runs, by name; closed forms are in `outcome.control`.
        seed: random seed of the bootstrap draws.
    """
    values = draws(outcome, seed)
    if values is None or not np.isfinite(outcome.value):
        return Judgement(None, None, "not decided")
    # the largest control counts; it is resampled together with the model if both have the same units
    others = [np.full(DRAWS, c) for c in outcome.control.values() if np.isfinite(c)]
    for control in controls.values():
        control_values = draws(control, seed)
        if np.isfinite(control.value):
            others.append(np.full(DRAWS, control.value) if control_values is None else control_values)
    if not others:  # no verdict without a control
        return Judgement(bounds(values), None, "not decided")
    margin = bounds(values - np.max(others, axis=0))
    verdict: Verdict = "yes" if margin[0] > limit else "no" if margin[1] < limit else "not decided"
    return Judgement(bounds(values), margin, verdict)


def bounds(values: np.ndarray) -> tuple[float, float]:
    """Return the bounds of the central 95 % of values."""
    low, high = np.nanpercentile(values, [2.5, 97.5])
    return float(low), float(high)
