"""All records of one model or segmenter, as a table and a verdict with its recommendation."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from vispe.errors import ShapeError, counted
from vispe.evaluate.rotation.record_key import D4_MEAN, FULL, POSITION_CODE, UNMOVED
from vispe.evaluate.rotation.records import METRICS, Measurement
from vispe.evaluate.rotation.verdict import remedy, scale_notes, verdict
from vispe.utils.report.result import Result
from vispe.utils.report.table import interval, json_entries, number


@dataclass(frozen=True, eq=False)
class RotationResult(Result):
    """All records of one model or segmenter.

    Attributes:
        rows: measurements on the same images.
        images: names of the images.
        settings: options that affect the numbers, JSON values.
        notes: remarks.

    Raises:
        ShapeError: a record has another number of values than there are images.

    Example:
        >>> import numpy as np
        >>> rows = (Measurement("rot90", "error", np.array([0.1, 0.3])),)
        >>> result = RotationResult(rows, ("a.png", "b.png"))
        >>> result.find("rot90", "error").summary().mean
        0.2
    """

    left = None

    rows: tuple[Measurement, ...]
    images: tuple[str, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        wrong = next((r for r in self.rows if len(r.values) != len(self.images)), None)
        if wrong is not None:
            raise ShapeError(
                f"RotationResult: {wrong.transform} {wrong.metric} must have {counted(len(self.images), 'value')}, "
                f"one per image, got {len(wrong.values)}. Pass one name per image."
            )

    def find(self, transform: str, metric: str, part: str = FULL) -> Measurement | None:
        """Return the record with this transform, metric and part, or None."""
        names = (transform, metric, part)
        return next((r for r in self.rows if (r.transform, r.metric, r.part) == names), None)

    @property
    def verdict(self) -> str:
        """Verdict on the features in one sentence; '' if the error over D4 was not measured."""
        full, r2 = self.find(D4_MEAN, "error"), self.find(UNMOVED, "r2")
        sentences = []
        if full is not None:
            sentences.append(verdict("features under rotation and reflection", full.summary().mean, "E"))
        if r2 is not None:
            sentences.append(verdict("features against position", r2.summary().median, "held-out R²"))
        return "; ".join(sentences)

    @property
    def remedy(self) -> str:
        """Recommendation in one sentence; '' if there is none."""
        full, position = self.find(D4_MEAN, "error"), self.find(D4_MEAN, "error", POSITION_CODE)
        if full is None:
            return ""
        return remedy(full.summary().mean, None if position is None else position.summary().mean)

    def to_dict(self, seed: int = 0) -> dict[str, Any]:
        """Return all fields as JSON values."""
        facts = json_entries(self, "verdict", "remedy", "images", "settings", "notes")
        return facts | {"rows": [row.to_dict(seed) for row in self.rows]}

    def table(self, seed: int = 0) -> list[list[str]]:
        """Return the table of all records as text, header first."""
        head = ["transform", "metric", "part", "mean", "median", "worst", "95 % interval", "floor", "effect"]
        return [head, *(_cells(row, seed) for row in self.rows)]


def notes_on_scale(rows: Iterable[Measurement]) -> tuple[str, ...]:
    """Return remarks on the scale of the equivariance errors in these records."""
    errors = [r for r in rows if r.metric == "error" and not r.control]
    mean = {r.part: r.summary().mean for r in errors if r.transform == D4_MEAN}
    full_errors = [float(v) for r in errors if r.part == FULL for v in r.values]
    return scale_notes(full_errors, mean.get(FULL, math.inf), mean.get(POSITION_CODE))


def _cells(row: Measurement, seed: int) -> list[str]:
    summary, effect = row.summary(seed), row.effect(seed)
    ends = interval(summary.interval) or f"{counted(summary.n, 'image')}: none"
    cells = [row.transform, METRICS[row.metric].title, row.part + (" (control)" if row.control else "")]
    cells += [number(summary.mean), number(summary.median), number(summary.worst), ends]
    return [*cells, number(row.floor_mean), number(effect and effect.mean)]
