"""Acceptance criteria of a retrofit, and the verdict."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from vispe.train.evaluate.mask_scores import finite_mean
from vispe.utils.report.html_page import Tone
from vispe.utils.report.table import json_list

READABLE, GONE = 0.5, 0.05
"""Held-out R² above which the teacher is considered biased, and below which the student is considered unbiased."""

BLANKED, COSINE, RANK, CORNER = 0.05, 0.9, 0.5, 0.02
"""Largest fraction of ablated channels, smallest cosine to the target, smallest effective rank relative to the teacher,
and largest loss of mIoU with scribbles in one corner in excess of that of filters. These limits are our choice."""


@dataclass(frozen=True)
class Criterion:
    """Measured number and its limit.

    >>> Criterion("rank", "effective rank", 0.9, 0.5, "least").limit_text
    'at least 0.5'

    Attributes:
        key: 'before', 'after', 'blanked', 'cosine', 'rank' or 'corner'.
        title: description of the number.
        value: the measured number.
        limit: smallest or largest acceptable value.
        sense: 'least' for a lower bound, 'most' for an upper bound.
    """

    key: str
    title: str
    value: float
    limit: float
    sense: Literal["least", "most"]

    @property
    def met(self) -> bool:
        """Whether the number is within the limit; not for NaN."""
        return bool(self.value >= self.limit if self.sense == "least" else self.value <= self.limit)

    @property
    def limit_text(self) -> str:
        """The limit as text, such as 'at least 0.5'."""
        return f"at {self.sense} {self.limit:.3g}"

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self) | {"value": json_list([self.value])[0], "met": self.met}


def criteria(
    *,
    before: float,
    after: float,
    blanked: float,
    cosine: float,
    rank: float,
    corner: Mapping[str, np.ndarray] | None,
) -> tuple[Criterion, ...]:
    """Return the criteria of a retrofit.

    Args:
        before: held-out R² of the teacher.
        after: held-out R² of the student.
        blanked: fraction of ablated channels.
        cosine: cosine of student and ablated teacher.
        rank: effective rank of the student relative to the teacher.
        corner: loss of mIoU of 'after' and 'filters' with scribbles in one corner, (n,) each; None without masks.
    """
    result = [
        Criterion("before", "decodable position before (held-out R²)", before, READABLE, "least"),
        Criterion("after", "decodable position after (held-out R²)", after, GONE, "most"),
        Criterion("blanked", "fraction of channels ablated in the target", blanked, BLANKED, "most"),
        Criterion("cosine", "cosine to the ablated teacher", cosine, COSINE, "least"),
        Criterion("rank", "effective rank relative to the teacher", rank, RANK, "least"),
    ]
    if corner is not None:
        extra = finite_mean(corner["after"] - corner["filters"])
        title = "mIoU lost with scribbles in one corner, in excess of filters"
        result.append(Criterion("corner", title, extra, CORNER, "most"))
    return tuple(result)


def verdict(measured: Sequence[Criterion]) -> str:
    """Return one sentence: whether position was present, whether it was removed, and the criteria that failed."""
    by_key = {c.key: c for c in measured}
    r2 = f"held-out R² {by_key['before'].value:.2f} before, {by_key['after'].value:.2f} after"
    if not np.isfinite(by_key["before"].value + by_key["after"].value):
        return "No verdict: position or features are constant on this grid"
    if not by_key["before"].met:
        removal = f"The teacher has little positional bias ({r2})"
    elif by_key["after"].met:
        removal = f"Position was removed ({r2})"
    else:
        removal = f"Position can still be decoded ({r2})"
    preserved = [
        ("cosine", f"cosine to the target {by_key['cosine'].value:.2f}"),
        ("rank", f"effective rank {100 * by_key['rank'].value:.0f} % of the teacher's"),
        ("blanked", f"{100 * by_key['blanked'].value:.1f} % of the channels ablated"),
    ]
    if "corner" in by_key:
        preserved.append(
            ("corner", f"corner scribbles cost {by_key['corner'].value:.2f} mIoU more than with filters")
        )
    failed = [phrase for key, phrase in preserved if not by_key[key].met]
    if failed:
        return f"{removal}, but the features degraded: {', '.join(failed)}"
    return f"{removal}; the features are preserved: {', '.join(phrase for _, phrase in preserved[:2])}"


def tone(measured: Sequence[Criterion]) -> Tone:
    """Return the colour of the verdict: good if all criteria are met, bad if position can still be decoded."""
    by_key = {c.key: c for c in measured}
    if not np.isfinite(by_key["before"].value + by_key["after"].value):
        return "plain"
    if not by_key["after"].met:
        return "bad"
    return "good" if all(c.met for c in measured) else "mild"
