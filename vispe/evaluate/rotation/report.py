"""Report of `vispe rotate` on one model or segmenter: records, fingerprint, and figures of one image."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vispe.evaluate.rotation import record_key
from vispe.evaluate.rotation.metrics.fingerprint import Fingerprint
from vispe.evaluate.rotation.records import Measurement
from vispe.evaluate.rotation.result import RotationResult
from vispe.evaluate.rotation.verdict import GRADES
from vispe.utils.report.html_page import Tone
from vispe.utils.report.result import Result
from vispe.utils.report.statistics import MIN_IMAGES
from vispe.utils.report.table import interval, json_entries, number

_CHANGE = "features, 0 = same, 1.41 = unrelated, no upper limit"
_AGREE = "labels, 1 = same"
_TRUTH = "mIoU, 1 = right"
_AFTER = "classifier trained on all poses"

_ORDER = "for comparison: patches in random order"
_D4 = "rotated by quarter turns and mirrored"
_SAME = "mIoU, 0 = same"

HEADLINES = {
    (record_key.D4_MEAN, "error", record_key.FULL): (_D4, _CHANGE),
    (record_key.D4_WORST, "error", record_key.FULL): ("the same, worst pose", _CHANGE),
    (record_key.D4_MEAN, "error", record_key.POSITION_CODE): (
        "the same, due to the position code alone",
        _CHANGE,
    ),
    (record_key.D4_MEAN, "error", record_key.RANDOM): ("for comparison: random weights", _CHANGE),
    (record_key.SHUFFLED, "error", record_key.FULL): (_ORDER, _CHANGE),
    (record_key.ALL_ANGLES, "error", record_key.FULL): ("rotated by other angles", _CHANGE),
    (f"{record_key.ROLL}, {record_key.WHOLE}", "error", record_key.FULL): (
        "shifted around by whole patches",
        _CHANGE,
    ),
    (f"{record_key.ROLL}, {record_key.PARTS}", "error", record_key.FULL): (
        "shifted around by parts of a patch",
        _CHANGE,
    ),
    (f"{record_key.CROP_SHIFT}, {record_key.WHOLE}", "error", record_key.FULL): (
        "window shifted by whole patches",
        _CHANGE,
    ),
    (f"{record_key.CROP_SHIFT}, {record_key.PARTS}", "error", record_key.FULL): (
        "window shifted by parts of a patch",
        _CHANGE,
    ),
    (record_key.UNMOVED, "r2", record_key.FULL): (
        "position in the image, decoded from the features",
        "R², 0 or less = not readable, 1 = exact",
    ),
    (record_key.SHUFFLED_POSITIONS, "r2", record_key.FULL): (_ORDER, "R², 0 or less"),
    (record_key.FOUR_CORNERS, "quadrant_gap", record_key.FULL): (
        "learnt in one corner, used in the others",
        "mIoU lost, if negative",
    ),
    (record_key.D4_MEAN, "miou", record_key.FULL): (_D4, f"{_AGREE} (mIoU)"),
    (record_key.D4_MEAN, "ari", record_key.FULL): (_D4, f"{_AGREE} (adjusted Rand)"),
    (record_key.D4_MEAN, "miou", record_key.FITTED_ONCE): (_D4, "clusters, 1 = same (mIoU)"),
    (record_key.ALL_POSES, "accuracy_mean", record_key.FULL): ("accuracy, mean over angles", _TRUTH),
    (record_key.ALL_POSES, "accuracy_worst", record_key.FULL): ("accuracy at the worst angle", _TRUTH),
    (record_key.ALL_POSES, "accuracy_spread", record_key.FULL): ("best minus worst angle", _SAME),
    (record_key.ALL_POSES, "accuracy_mean", record_key.EVERY_POSE): (f"{_AFTER}: mean", _TRUTH),
    (record_key.ALL_POSES, "accuracy_worst", record_key.EVERY_POSE): (f"{_AFTER}: worst angle", _TRUTH),
    (record_key.ALL_POSES, "accuracy_spread", record_key.EVERY_POSE): (f"{_AFTER}: best minus worst", _SAME),
}
"""Headline records as (transform, metric, part), in the order of the short table, with a description of the transform
and of the number."""


@dataclass(frozen=True, eq=False)
class RotationReport(Result):
    """Results of `vispe rotate` for one model or segmenter.

    Attributes:
        subject: title, such as the name of the model.
        result: all records, the names of the images, settings and notes.
        fingerprint: the mean map over many images; None for a segmenter, or if it was not computed.
        picture: the first image, RGB (H, W, 3) in [0, 1], before normalisation.
        poses: the first principal components of its maps as colours, (h, w, 3) in [0, 1], for every pose with the pose
            undone, on the axes of the original map: 'identity' first, then the other elements of D4.
        labels: label maps (H, W) of the first image with the pose undone, 'identity' first; {} for features only.
        names: of the classes.

    Raises:
        InputError: `write_json` is called for an existing file without `force`.

    Example:
        >>> from vispe.evaluate.rotation.records import Measurement
        >>> row = Measurement("rot90", "error", np.array([0.1, 0.3]))
        >>> report = RotationReport("vit", RotationResult((row,), ("a.png", "b.png")))
        >>> report.to_dict()["subject"], report.result.images
        ('vit', ('a.png', 'b.png'))
    """

    left = None

    subject: str
    result: RotationResult
    fingerprint: Fingerprint | None = None
    picture: np.ndarray | None = None
    poses: dict[str, np.ndarray] = field(default_factory=dict)
    labels: dict[str, np.ndarray] = field(default_factory=dict)
    names: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """Verdict in one sentence, on the features, or on the labels of a segmenter."""
        sentences = [self.result.verdict] if self.result.verdict else []
        agree = self.result.find(record_key.D4_MEAN, "miou")
        if agree is not None:
            percent = 100 * agree.summary().mean
            sentences.append(
                f"labels under rotation and reflection: mIoU {percent:.1f} % with those of the original image"
            )
        spread = self.result.find(record_key.ALL_POSES, "accuracy_spread")
        if spread is not None:
            points = 100 * spread.summary().mean
            sentences.append(f"accuracy: {points:.1f} points of mIoU between the best and the worst pose")
        return "; ".join(sentences)

    @property
    def headlines(self) -> tuple[Measurement, ...]:
        """Headline records, and the area fraction of every class over poses."""
        areas = (r for r in self.result.rows if r.metric == "phase_spread")
        return (*filter(None, (self.result.find(*key) for key in HEADLINES)), *areas)

    @property
    def tone(self) -> Tone:
        """Colour of the verdict in the report, that of the worst feature metric."""
        full, r2 = self.result.find(record_key.D4_MEAN, "error"), self.result.find(record_key.UNMOVED, "r2")
        values = [*([full.summary().mean] if full else []), *([r2.summary().median] if r2 else [])]
        return GRADES.tone(max(filter(np.isfinite, values), default=float("nan")))

    def table(self, seed: int = 0) -> list[list[str]]:
        """Return the table of headlines as text, header first; `result.table` returns all records."""
        intervals = len(self.result.images) >= MIN_IMAGES
        head = ["what was done to the sample", "what is compared", "mean", "worst image"]
        table = [[*head, *(["95 % interval"] if intervals else []), "resampling alone"]]
        for row in self.headlines:
            summary = row.summary(seed)
            cells = [*_descriptions(row), number(summary.mean, 3), number(summary.worst, 3)]
            if intervals:
                cells.append(interval(summary.interval, 3))
            table.append([*cells, number(row.floor_mean, 3)])
        return table

    def to_dict(self, seed: int = 0) -> dict[str, Any]:
        """Return JSON values: verdict, remedy, settings, all records with values per image, and fingerprint."""
        classes = {"classes": list(self.names), **json_entries(self, "fingerprint")}
        return {"subject": self.subject, **self.result.to_dict(seed), **classes}


def _descriptions(row: Measurement) -> tuple[str, str]:
    """Return the descriptions of the transform and of the number."""
    if row.metric == "phase_spread":
        where = f"{_AFTER}: " if row.key.training else ""
        return f"{where}area of {row.key.part}, largest minus smallest", "percentage points, 0 = same"
    return HEADLINES[row.transform, row.metric, row.part]
