"""The limits that a good retrofit keeps, and the sentence that says whether this one does."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from vispe.report.html_page import Tone
from vispe.report.table import json_list
from vispe.train.evaluate.mask_scores import mean_known

READABLE, GONE = 0.5, 0.05
"""Held-out R² from which a model counts as biased before, and up to which it counts as freed after."""

BLANKED, COSINE, RANK, CORNER = 0.05, 0.9, 0.5, 0.02
"""Largest share of blanked channels, least cosine to the target, least share of the teacher's effective rank, and
largest loss of mIoU with scribbles in one corner beyond what filters lose. All of these limits are our choice."""


@dataclass(frozen=True)
class Criterion:
    """One number and what it should be.

    >>> Criterion("rank", "effective rank", 0.9, 0.5, "least").asked
    'at least 0.5'

    Attributes:
        key: 'before', 'after', 'blanked', 'cosine', 'rank' or 'corner'.
        title: what the number is.
        value: the measured number.
        limit: its least or largest good value.
        sense: whether the limit is the least or the most.
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
    def asked(self) -> str:
        """The limit in words."""
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
        after: of the student.
        blanked: share of blanked channels.
        cosine: of student and blanked teacher.
        rank: effective rank of the student as a share of the teacher's.
        corner: mIoU lost by 'after' and by 'filters' with scribbles in one corner, of each image; None without masks.
    """
    asked = [
        Criterion("before", "position readable before (held-out R²)", before, READABLE, "least"),
        Criterion("after", "position readable after (held-out R²)", after, GONE, "most"),
        Criterion("blanked", "share of channels blanked in the target", blanked, BLANKED, "most"),
        Criterion("cosine", "cosine to the blanked teacher", cosine, COSINE, "least"),
        Criterion("rank", "effective rank, as a share of the teacher's", rank, RANK, "least"),
    ]
    if corner is not None:
        extra = mean_known(corner["after"] - corner["filters"])
        title = "mIoU lost with scribbles in one corner, beyond what filters lose"
        asked.append(Criterion("corner", title, extra, CORNER, "most"))
    return tuple(asked)


def verdict(measured: Sequence[Criterion]) -> str:
    """Return one sentence: was there position, is it gone, and what of the rest was not met."""
    by = {c.key: c for c in measured}
    r2 = f"held-out R² {by['before'].value:.2f} before, {by['after'].value:.2f} after"
    if not np.isfinite(by["before"].value + by["after"].value):
        return "Cannot be judged: position is constant on this grid, or the features are"
    if not by["before"].met:
        gone = f"There was little position to remove ({r2})"
    elif by["after"].met:
        gone = f"Position is gone ({r2})"
    else:
        gone = f"Position can still be read ({r2})"
    kept = [
        ("cosine", f"cosine to its target {by['cosine'].value:.2f}"),
        ("rank", f"effective rank {100 * by['rank'].value:.0f} % of the teacher's"),
        ("blanked", f"{100 * by['blanked'].value:.1f} % of the channels blanked"),
    ]
    if "corner" in by:
        kept.append(("corner", f"corner scribbles cost {by['corner'].value:.2f} mIoU more than with filters"))
    failed = [words for key, words in kept if not by[key].met]
    if failed:
        return f"{gone}, but the features lost too much: {', '.join(failed)}"
    return f"{gone}; the features kept what they said: {', '.join(words for _, words in kept[:2])}"


def tone(measured: Sequence[Criterion]) -> Tone:
    """Return the colour of the verdict: good when all is met, bad when position is still readable."""
    by = {c.key: c for c in measured}
    if not np.isfinite(by["before"].value + by["after"].value):
        return "plain"
    if not by["after"].met:
        return "bad"
    return "good" if all(c.met for c in measured) else "mild"
