"""What an audit found: a finding for every measure, in words, tables and JSON; and two audits side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from vispe.errors import ShapeError
from vispe.evaluate.audit.measure import Measure, Outcome
from vispe.evaluate.audit.verdict import Judged, Verdict, draws, ends, limit
from vispe.report.html_page import Tone
from vispe.report.table import aligned, interval, json_value, number


@dataclass(frozen=True, eq=False)
class Finding:
    """The answer to one question.

    Attributes:
        name: of the measure.
        family: attention, features or behaviour.
        asks: the question.
        number: what the value is.
        misleads: when it is wrong or harmless.
        value: the headline.
        interval: 95 % over images; None with fewer than 5.
        margin: 95 % of value minus the largest control; None likewise.
        control: values without the effect, by name.
        largest: of the controls that count.
        verdict: yes, no or not decided.
        outcome: all that follows from the images.
        control_layers: the value after every layer in each control that has one.
    """

    name: str
    family: str
    asks: str
    number: str
    misleads: str
    value: float
    interval: tuple[float, float] | None
    margin: tuple[float, float] | None
    control: dict[str, float]
    largest: float
    verdict: Verdict
    outcome: Outcome
    control_layers: dict[str, Sequence[float]] = field(default_factory=dict)

    @classmethod
    def of(cls, measure: Measure, own: Outcome, others: dict[str, Outcome], judged: Judged) -> Finding:
        """Return the finding of a measure from the outcomes of its passes."""
        counted = own.control | {v: o.value for v, o in others.items() if v in measure.controls}
        return cls(
            *(measure.name, measure.family, measure.asks, measure.number, measure.misleads),
            own.value,
            judged.interval,
            judged.margin,
            own.control | {view: o.value for view, o in others.items()},
            max((c for c in counted.values() if np.isfinite(c)), default=0.0),
            judged.verdict,
            own,
            {view: o.per_layer for view, o in others.items() if len(o.per_layer)},
        )

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values, those of every image included."""
        shown = (
            "name",
            "family",
            "asks",
            "number",
            "misleads",
            "value",
            "interval",
            "margin",
            "control",
            "verdict",
        )
        return json_value(
            {name: getattr(self, name) for name in shown}
            | {
                "limit": limit(self.name),
                "note": self.outcome.note,
                "per_image": list(self.outcome.per_image),
                "per_layer": list(self.outcome.per_layer),
                "control_layers": {view: list(v) for view, v in self.control_layers.items()},
                "details": self.outcome.details,
            }
        )

    def row(self) -> list[str]:
        """Return the row of the table: question, number, interval, control, verdict."""
        controls = ", ".join(f"{name} {number(v)}" for name, v in self.control.items())
        return [self.asks, number(self.value), interval(self.interval), controls, self.verdict]


@dataclass(frozen=True, eq=False)
class Audit:
    """What was found in one model.

    Attributes:
        title: of the model.
        findings: in the order of the page.
        refused: question and reason of every measure that this model cannot answer.
        images: how many were looked at.
        missing: controls that could not be run, with the reason.
    """

    title: str
    findings: tuple[Finding, ...]
    refused: dict[str, tuple[str, str]]
    images: int
    missing: dict[str, str]

    @property
    def verdict(self) -> str:
        """One sentence: what of the model depends on places."""
        yes = [f.name.replace("_", " ") for f in self.findings if f.verdict == "yes"]
        open_ = sum(f.verdict == "not decided" for f in self.findings)
        rest = f"; {open_} not decided" if open_ else ""
        if not yes:
            return f"no effect of places found by {len(self.findings)} measures{rest}"
        return f"{len(yes)} of {len(self.findings)} questions are answered by yes ({', '.join(yes)}){rest}"

    @property
    def tone(self) -> Tone:
        """How the verdict is coloured."""
        yes = sum(f.verdict == "yes" for f in self.findings)
        return "good" if not yes else "mild" if yes <= len(self.findings) // 4 else "bad"

    @property
    def notes(self) -> tuple[str, ...]:
        """What weakens the verdict, one sentence each."""
        notes = [f"Control {view!r} was not run: {why}." for view, why in self.missing.items()]
        if all(f.interval is None for f in self.findings):
            notes.append(
                f"{self.images} image(s) give no interval and so no verdict; give at least 5 images."
            )
        return tuple(notes)

    def rows(self) -> list[list[str]]:
        """Return the table as text, its heads first; what was not measured comes last, with the reason."""
        head = ["question", "number", "95 % interval", "control", "verdict"]
        refused = [[asks, "-", "", f"not measured: {why}", "-"] for asks, why in self.refused.values()]
        return [head, *(f.row() for f in self.findings), *refused]

    def to_markdown(self) -> str:
        """Return the table as Markdown, its columns aligned."""
        return aligned(self.rows(), left=(0, 1, 2, 3, 4))

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "title": self.title,
            "verdict": self.verdict,
            "notes": list(self.notes),
            "images": self.images,
            "findings": [f.to_dict() for f in self.findings],
            "refused": {name: {"asks": asks, "why": why} for name, (asks, why) in self.refused.items()},
            "controls_missing": dict(self.missing),
        }


@dataclass(frozen=True, eq=False)
class Against:
    """Two models on the same images: the differences of their numbers, images in pairs.

    Attributes:
        first: one model.
        second: the other.
        heads: how far layers are apart, (layers of the first, layers of the second) float64 in nats, by their nearest
            heads; None where that cannot be read.
        no_heads: the reason.
    """

    first: Audit
    second: Audit
    heads: Tensor | None = None
    no_heads: str = "it was not asked"

    def __post_init__(self) -> None:
        if self.first.images != self.second.images:
            raise ShapeError(
                f"Two audits are compared on the same images, got {self.first.images} and {self.second.images}."
            )

    def rows(self) -> list[list[str]]:
        """Return the table of differences as text, its heads first."""
        head = ["question", self.first.title, self.second.title, "difference", "95 % interval"]
        rows = [head]
        for f, g in self._pairs():
            values = (f.value, g.value, g.value - f.value)
            rows.append([f.asks, *map(number, values), interval(self._ends(f, g))])
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values: of every measure that both answered, the difference and its interval."""
        return {
            "title": self.second.title,
            "audit": self.second.to_dict(),
            "differences": {
                f.name: json_value({"difference": g.value - f.value, "interval": self._ends(f, g)})
                for f, g in self._pairs()
            },
            "heads": {"why": self.no_heads} if self.heads is None else {"nats": self.heads.tolist()},
        }

    def to_markdown(self) -> str:
        """Return the table of differences as Markdown."""
        return aligned(self.rows())

    def _pairs(self) -> list[tuple[Finding, Finding]]:
        by_name = {g.name: g for g in self.second.findings}
        return [(f, by_name[f.name]) for f in self.first.findings if f.name in by_name]

    @staticmethod
    def _ends(f: Finding, g: Finding) -> tuple[float, float] | None:
        first, second = draws(f.outcome), draws(g.outcome)
        if first is None or second is None or f.outcome.n != g.outcome.n:
            return None
        return ends(np.asarray(second) - first)
