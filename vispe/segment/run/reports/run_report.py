"""Progress callbacks, the record of each image, and the report of a run."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from vispe.segment.features.pixel_features import Features
from vispe.segment.materials.image_record import table_row
from vispe.segment.metrics import summarize
from vispe.segment.model.model_file import Model
from vispe.segment.objects.sizes import summarize_batch
from vispe.segment.run.reports.html_report import write_page
from vispe.segment.types import PostProcessing
from vispe.utils.files import write_csv, write_json
from vispe.utils.version import versions

_SCORES = ("miou", "mean_dice", "mean_boundary_f1", "pixel_accuracy", "balanced_accuracy")
_TRUST = ("dependence", "agreement", "spread_pp", "floor_pp")
_COLUMNS = ("image", "pages", "height", "width", "seconds", "mean_uncertainty", "tile_disagreement")
_ERRORS = ("phase_fraction_mean_abs_error_pp", "fraction_mean_abs_error_pp")


class ProgressCallbacks:
    """Callbacks for the progress of a run; the base class does nothing."""

    def start(self, what: str, total: int) -> None:
        """Called when a stage of the run with `total` images starts."""

    def step(self, fraction: float) -> None:
        """Called when a fraction of one image is done; the fractions of an image sum to 1."""

    def note(self, text: str) -> None:
        """Called with a message for the user."""

    def done(self, record: Mapping[str, Any]) -> None:
        """Called when an image and all its files are complete."""

    def failed(self, path: str, reason: str) -> None:
        """Called when an image of a batch failed."""


@dataclass
class Report:
    """The result of a run.

    Attributes:
        run: settings, JSON-able.
        images: records of the finished images.
        failures: `{'image': path, 'reason': text}` for each image that failed.
        notes: messages about the run.
        peak_memory_mb: peak memory of the process so far, and of the GPU if one was used.
    """

    run: dict[str, Any]
    images: list[dict[str, Any]] = field(default_factory=list)
    failures: list[dict[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    peak_memory_mb: dict[str, float] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """0 when every image is done, else 1."""
        return 1 if self.failures else 0

    def summary(self) -> dict[str, Any]:
        """Summarise each score over the images with ground truth: mean, median, std, worst, interval."""
        scored = [record["scores"] for record in self.images if "scores" in record]
        if not scored:
            return {}
        keys = [(key, True) for key in _SCORES]
        keys += [(key, False) for key in _ERRORS if all(key in s for s in scored)]
        if any("adjusted_rand" in s for s in scored):
            keys.append(("adjusted_rand", True))
        return {key: summarize(scored, key, higher_is_better=up) for key, up in keys}

    def as_dict(self) -> dict[str, Any]:
        """Return the complete report as a JSON-able dict."""
        objects = summarize_batch(self.images)
        return {
            **self.run,
            "peak_memory_mb": self.peak_memory_mb,
            "notes": self.notes,
            "summary": self.summary(),
            **({} if objects is None else {"objects": objects}),
            "images": self.images,
            "failures": self.failures,
        }

    def write(self, folder: Path) -> None:
        """Write `report.json` and `report.csv` into `folder`, replacing earlier ones of this run."""
        self.peak_memory_mb = peak_memory()
        write_json(folder / "report.json", self.as_dict(), force=True)
        if self.images:
            error = self.run.get("training", {}).get("calibration", {}).get("expected_calibration_error")
            write_csv(folder / "report.csv", [_row(record, error) for record in self.images], force=True)

    def finish(self, folder: Path) -> None:
        """Write the HTML report, `report.html`."""
        write_page(folder, self.as_dict())


def peak_memory() -> dict[str, float]:
    """Return the peak memory so far in MB: of the process, and of the GPU if one was used."""
    out: dict[str, float] = {}
    if sys.platform != "win32":
        import resource

        unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, kilobytes elsewhere
        out["process"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6, 1)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        out["gpu"] = round(torch.cuda.max_memory_allocated() / 1e6, 1)
    return out


def run_settings(features: Features, model: Model, post: PostProcessing) -> dict[str, Any]:
    """Return the settings of a run for its report, JSON-able: features, classifier, classes, post-processing."""
    config = vars(features.config)
    return {
        "model": features.config.model or "filters",
        "features": {
            key: list(value) if isinstance(value, tuple) else value for key, value in config.items()
        },
        "classifier": model.classifier.kind,
        "classes": list(model.names),
        "normalize": model.normalize,
        "clip": list(model.clip),
        "post": {**vars(post), "prior": post.resolve_prior(model.classifier)},
        "training": dict(model.notes),
        "seed": model.seed,
        "device": features.device,
        "versions": versions(),
    }


def _row(record: Mapping[str, Any], calibration_error: float | None) -> dict[str, Any]:
    """Flatten a record to one row of `report.csv`."""
    scores = record.get("scores", {})
    row = {key: record[key] for key in _COLUMNS} | {"map_fraction": record["map_fractions"]}
    row |= {"fraction_kind": record["fraction_kind"], "fraction": record["fractions"]}
    if record["priors"] is not None:
        for bound_index, bound in enumerate(("low", "high")):
            bounds = {name: e and e[bound_index] for name, e in (record["fractions_ci95"] or {}).items()}
            row[f"fraction_{bound}"] = bounds
        row["expected_calibration_error"] = calibration_error
    row["domain"] = None if record["domain"] is None else record["domain"]["score"]
    for key in (*_SCORES, *_ERRORS, "adjusted_rand", "iou", "dice", "boundary_f1", "phase_fraction_error_pp"):
        if key in scores:
            row[key] = scores[key]
    if "materials" in record:
        row["materials"] = table_row(record["materials"])
    if "trust" in record:
        row["trust"] = {key: record["trust"][key] for key in _TRUST}
    return row
