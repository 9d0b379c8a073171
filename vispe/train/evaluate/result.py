"""The result of an evaluation: each side, both together, and the JSON of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vispe.evaluate.probe.positional import ProbeResult
from vispe.evaluate.rotation.metrics.fingerprint import Fingerprint
from vispe.evaluate.rotation.report import RotationReport
from vispe.files import write_json
from vispe.report.table import json_entries, json_list, json_value
from vispe.train.evaluate.criteria import Criterion, criteria, verdict
from vispe.train.evaluate.mask_scores import MaskScores
from vispe.train.evaluate.model_pair import SIDES


@dataclass(frozen=True, eq=False)
class Side:
    """The measurements of one model.

    Attributes:
        probes: positional probe by kind of pictures: 'noise', 'textures', 'images'.
        rank: effective rank of the features of each image, (n,).
        fingerprint: mean map over noise images; None where it was not made.
        rotation: rows under turns and mirroring; None where it was not measured.
    """

    probes: Mapping[str, ProbeResult]
    rank: np.ndarray
    fingerprint: Fingerprint | None = None
    rotation: RotationReport | None = None

    @property
    def readable(self) -> float:
        """Held-out R² on pictures that show no place: the larger of the medians over noise and over textures."""
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
class RetrofitReport:
    """A model before and after its retrofit.

    Attributes:
        subject: title.
        before: the teacher.
        blanked: the teacher with the channels at 0: its probes and rank alone.
        after: the student.
        channels: that were blanked.
        width: number of channels.
        cosine: of student and teacher, mean over patches, (n,).
        cosine_blanked: of student and blanked teacher, (n,).
        image_names: of the n images that cosine and rank were measured on.
        segmentation: linear segmentation; None without masks.
        classes: their names.
        settings: what the numbers depend on.
        notes: remarks for the reader.
    """

    subject: str
    before: Side
    blanked: Side
    after: Side
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
    def sides(self) -> dict[str, Side]:
        """The three sides by name."""
        return {name: getattr(self, name) for name in SIDES}

    @property
    def criteria(self) -> tuple[Criterion, ...]:
        """The numbers that have limits."""
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
        """One sentence."""
        return verdict(self.criteria)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values: the verdict, the criteria, and every number of every image."""
        return {
            **json_entries(self, "subject", "verdict", "criteria", "channels", "width"),
            "blanked_share": len(self.channels) / self.width,
            "images": list(self.image_names),
            **json_entries(self, "cosine", "cosine_blanked", *SIDES),
            **json_entries(self, "segmentation", "classes", "settings", "notes"),
        }

    def write_json(self, path: str | Path, force: bool = False) -> Path:
        """Write `to_dict`; an existing file is replaced with `force` only.

        Raises:
            InputError: the file exists.
        """
        return write_json(path, self.to_dict(), force)
