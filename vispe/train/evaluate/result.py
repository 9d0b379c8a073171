"""Result of an evaluation: measurements before and after, criteria and JSON."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vispe.evaluate.probe.positional import ProbeResult
from vispe.evaluate.rotation.metrics.fingerprint import Fingerprint
from vispe.evaluate.rotation.report import RotationReport
from vispe.train.evaluate.criteria import Criterion, criteria, tone, verdict
from vispe.train.evaluate.mask_scores import MaskScores
from vispe.train.evaluate.model_pair import SIDES
from vispe.utils.report.html_page import Tone
from vispe.utils.report.result import Result
from vispe.utils.report.table import json_entries, json_list, json_value, number


@dataclass(frozen=True, eq=False)
class ModelMeasurements:
    """Measurements of one model.

    Attributes:
        probes: positional probe by kind of images: 'noise', 'textures', 'images'.
        rank: effective rank of the features of each image, (n,).
        fingerprint: mean map over noise images, or None.
        rotation: response to rotations and reflections, or None.
    """

    probes: Mapping[str, ProbeResult]
    rank: np.ndarray
    fingerprint: Fingerprint | None = None
    rotation: RotationReport | None = None

    @property
    def readable(self) -> float:
        """Held-out R² on images without positional cue: the larger of the medians over noise and over textures."""
        return max(p.headline for name, p in self.probes.items() if name != "images")

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "readable_r2": json_value(self.readable),
            "probe": {name: probe.to_dict() for name, probe in self.probes.items()},
            **json_entries(self, "fingerprint", "rotation"),
            "effective_rank": json_list(self.rank),
        }


@dataclass(frozen=True, eq=False)
class RetrofitReport(Result):
    """Evaluation of a model before and after its retrofit.

    Attributes:
        subject: title.
        before: the teacher.
        blanked: the teacher with ablated channels: probes and rank only.
        after: the student.
        channels: ablated channels.
        width: number of channels.
        cosine: cosine of student and teacher, mean over patches, (n,).
        cosine_blanked: cosine of student and ablated teacher, (n,).
        image_names: names of the n images for cosine and rank.
        segmentation: linear segmentation; None without masks.
        classes: names of the classes.
        settings: settings of the evaluation.
        notes: notes for the reader.
    """

    subject: str
    before: ModelMeasurements
    blanked: ModelMeasurements
    after: ModelMeasurements
    channels: tuple[int, ...]
    width: int
    cosine: np.ndarray
    cosine_blanked: np.ndarray
    image_names: tuple[str, ...]
    segmentation: MaskScores | None = None
    classes: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def sides(self) -> dict[str, ModelMeasurements]:
        """The measurements by name, in the order of `SIDES`."""
        return {name: getattr(self, name) for name in SIDES}

    @property
    def criteria(self) -> tuple[Criterion, ...]:
        """The acceptance criteria."""
        return criteria(
            before=self.before.readable,
            after=self.after.readable,
            blanked=len(self.channels) / self.width,
            cosine=float(np.mean(self.cosine_blanked)),
            rank=float(np.median(self.after.rank / self.before.rank)),
            corner=None if self.segmentation is None else self.segmentation.corner,
        )

    @property
    def verdict(self) -> str:
        """The verdict as one sentence."""
        return verdict(self.criteria)

    @property
    def tone(self) -> Tone:
        """Colour of the verdict in the report."""
        return tone(self.criteria)

    def table(self) -> list[list[str]]:
        """Return the table of criteria as text, header first."""
        rows = [["", "measured", "limit", ""]]
        for criterion in self.criteria:
            met = "" if not np.isfinite(criterion.value) else "met" if criterion.met else "not met"
            rows.append([criterion.title, scientific(criterion.value), criterion.limit_text, met])
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values: the verdict, the criteria, and every number of every image."""
        return {
            **json_entries(self, "subject", "verdict", "criteria", "channels", "width"),
            "blanked_share": len(self.channels) / self.width,
            "images": list(self.image_names),
            **json_entries(self, "cosine", "cosine_blanked", *SIDES),
            **json_entries(self, "segmentation", "classes", "settings", "notes"),
        }


def scientific(value: float) -> str:
    """Return a number as text, in scientific notation below 5e-4."""
    return f"{value:.1e}" if 0 < abs(value) < 5e-4 else number(value)
