"""Findings of an audit as text, table and JSON, and the comparison of two audits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from vispe.errors import ShapeError, counted
from vispe.evaluate.measure.base import Measure, Outcome
from vispe.evaluate.measure.verdict import Judgement, Verdict, bounds, draws
from vispe.utils.report.html_page import Tone
from vispe.utils.report.result import Result
from vispe.utils.report.statistics import MIN_IMAGES
from vispe.utils.report.table import interval, json_entries, json_value, number


@dataclass(frozen=True, eq=False)
class Finding:
    """Result of one measure with its controls.

    Attributes:
        name: name of the measure.
        family: attention, features or behaviour.
        question: the question that the measure answers.
        number: meaning of the value.
        misleads: cases in which the value is wrong or harmless.
        value: the headline.
        interval: 95 % confidence interval over images; None for fewer than 5 units.
        margin: 95 % confidence interval of the value minus the largest control; None for fewer than 5 units.
        control: values without the effect, by name.
        largest: largest control that counts for the verdict.
        verdict: yes, no or not decided.
        limit: min excess over the largest control for a verdict of yes.
        outcome: the result of the model itself, with per-image values.
        control_layers: values after every layer, for controls with such values.
    """

    name: str
    family: str
    question: str
    number: str
    misleads: str
    value: float
    interval: tuple[float, float] | None
    margin: tuple[float, float] | None
    control: dict[str, float]
    largest: float
    verdict: Verdict
    limit: float
    outcome: Outcome
    control_layers: dict[str, Sequence[float]] = field(default_factory=dict)

    @classmethod
    def of(cls, measure: Measure, own: Outcome, others: dict[str, Outcome], judged: Judgement) -> Finding:
        """Return the finding of a measure from the outcomes of its runs."""
        controls = own.control | {v: o.value for v, o in others.items() if v in measure.controls}
        return cls(
            *(measure.name, measure.family, measure.question, measure.number, measure.misleads),
            own.value,
            judged.interval,
            judged.margin,
            own.control | {view: o.value for view, o in others.items()},
            max((c for c in controls.values() if np.isfinite(c)), default=0.0),
            judged.verdict,
            measure.limit,
            own,
            {view: o.per_layer for view, o in others.items() if len(o.per_layer)},
        )

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values, including those of every image."""
        return {
            **json_entries(self, "name", "family"),
            "asks": self.question,  # key of 0.2
            **json_entries(self, "number", "misleads"),
            **json_entries(self, "value", "interval", "margin", "control", "verdict", "limit"),
            **json_entries(self.outcome, "note", "per_image", "per_layer"),
            **json_entries(self, "control_layers"),
            **json_entries(self.outcome, "details"),
        }

    def row(self) -> list[str]:
        """Return the row of the table: question, number, interval, control, verdict."""
        controls = ", ".join(f"{name} {number(v)}" for name, v in self.control.items())
        return [self.question, number(self.value), interval(self.interval), controls, self.verdict]


@dataclass(frozen=True, eq=False)
class Audit(Result):
    """Findings for one model.

    Attributes:
        title: name of the model.
        findings: one per measure, in the order of the report.
        refused: question and reason for every measure that is not supported by the model.
        images: number of images.
        missing: controls that could not be run, with the reason.
    """

    left = None

    title: str
    findings: tuple[Finding, ...]
    refused: dict[str, tuple[str, str]]
    images: int
    missing: dict[str, str]

    @property
    def verdict(self) -> str:
        """Verdict in one sentence: which measures found an effect of positions."""
        yes = [f.name.replace("_", " ") for f in self.findings if f.verdict == "yes"]
        open_ = sum(f.verdict == "not decided" for f in self.findings)
        rest = f"; {open_} not decided" if open_ else ""
        if not self.findings:
            return "no measure could be computed"
        if not yes:
            number = sum(f.verdict == "no" for f in self.findings)
            return f"{counted(number, 'measure')} found no effect of positions{rest}"
        return (
            f"{len(yes)} of {counted(len(self.findings), 'question')} answered yes ({', '.join(yes)}){rest}"
        )

    @property
    def tone(self) -> Tone:
        """Colour of the verdict in the report."""
        yes = sum(f.verdict == "yes" for f in self.findings)
        return "good" if not yes else "mild" if yes <= len(self.findings) // 4 else "bad"

    @property
    def notes(self) -> tuple[str, ...]:
        """Caveats of the verdict, one sentence each."""
        # the first sentence of the reason; `controls_missing` has all of it
        notes = [
            f"Control {view!r} was not run: {why.partition('. ')[0]}." for view, why in self.missing.items()
        ]
        if self.findings and all(f.interval is None for f in self.findings):
            reason = f"{counted(self.images, 'image')} {'is' if self.images == 1 else 'are'} too few"
            # images without a value, such as those with constant features, do not count
            if self.images >= MIN_IMAGES:
                reason = f"Fewer than {MIN_IMAGES} images have a value, too few"
            notes.append(f"{reason} for an interval and a verdict; use at least {MIN_IMAGES} images.")
        return tuple(notes)

    def table(self) -> list[list[str]]:
        """Return the table as text, header first; unsupported measures come last, with the reason."""
        head = ["question", "number", "95 % interval", "control", "verdict"]
        refused = [
            [question, "-", "", f"not measured: {why}", "-"] for question, why in self.refused.values()
        ]
        return [head, *(f.row() for f in self.findings), *refused]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "title": self.title,
            "verdict": self.verdict,
            "notes": list(self.notes),
            "images": self.images,
            "findings": [f.to_dict() for f in self.findings],
            "refused": {
                name: {"asks": question, "why": why} for name, (question, why) in self.refused.items()
            },
            "controls_missing": dict(self.missing),
        }


@dataclass(frozen=True, eq=False)
class Comparison(Result):
    """Comparison of two models on the same images, by paired differences.

    Attributes:
        first: audit of the reference model.
        second: audit of the other model.
        heads: divergence of layers by their most similar heads, (layers of the first, layers of the second) float64 in
            nats; None if it is not available.
        heads_reason: the reason for None.

    Raises:
        ShapeError: the audits have different numbers of images.
    """

    first: Audit
    second: Audit
    heads: Tensor | None = None
    heads_reason: str = "it was not requested"

    def __post_init__(self) -> None:
        if self.first.images != self.second.images:
            raise ShapeError(
                f"Against: both audits must use the same images, got {self.first.images} and {self.second.images}. Run "
                "them on the same images."
            )

    def table(self) -> list[list[str]]:
        """Return the table of differences as text, header first."""
        head = ["question", self.first.title, self.second.title, "difference", "95 % interval"]
        rows = [head]
        for f, g in self._pairs():
            values = (f.value, g.value, g.value - f.value)
            rows.append([f.question, *map(number, values), interval(self._interval(f, g))])
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values: difference and interval of every measure that both models support."""
        return {
            "title": self.second.title,
            "audit": self.second.to_dict(),
            "differences": {
                f.name: json_value({"difference": g.value - f.value, "interval": self._interval(f, g)})
                for f, g in self._pairs()
            },
            "heads": {"why": self.heads_reason} if self.heads is None else {"nats": self.heads.tolist()},
        }

    def _pairs(self) -> list[tuple[Finding, Finding]]:
        by_name = {g.name: g for g in self.second.findings}
        return [(f, by_name[f.name]) for f in self.first.findings if f.name in by_name]

    @staticmethod
    def _interval(f: Finding, g: Finding) -> tuple[float, float] | None:
        first, second = draws(f.outcome), draws(g.outcome)
        if first is None or second is None or f.outcome.n != g.outcome.n:
            return None
        return bounds(np.asarray(second) - first)
