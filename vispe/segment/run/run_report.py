"""Progress callbacks, the record of each image, and the report of a run."""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vispe.segment.classify.class_prior import SPREADS, interval
from vispe.segment.features.pixel_features import Features
from vispe.segment.materials.image_record import table_row
from vispe.segment.metrics import summarize
from vispe.segment.model.model_file import Model
from vispe.segment.objects.sizes import summarize_batch
from vispe.segment.run.html_report import write_page
from vispe.segment.types import Areas, ImageFacts, PostProcessing
from vispe.utils.files import write_csv, write_json
from vispe.utils.version import versions

_SCORES = ("miou", "mean_dice", "mean_boundary_f1", "pixel_accuracy", "balanced_accuracy")
# a class has vanished if its area before reweighting exceeds the first fraction of the pixels, and reweighting
# leaves less than the second fraction of that area
_SEEN, _LEFT = 0.05, 0.1
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


class Clock:
    """Stopwatch: returns the seconds since it was created."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def __call__(self) -> float:
        """Return the seconds so far."""
        return time.perf_counter() - self._start


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


def vanishing_class_notes(areas: Areas | None, names: Sequence[str]) -> list[str]:
    """Return a note for each class that loses nearly all of its pixels by the reweighting.

    This happens for classes that are truly rare, and for classes that are hard to distinguish: the estimated
    frequencies then converge to one of these classes.

    Args:
        areas: estimated areas; None without reweighting.
        names: K class names.
    """
    if areas is None or not (total := areas.pixels.sum()):
        return []
    before, after = areas.unweighed / total, areas.pixels / total
    return [
        f"class {name!r} is most probable for {100 * b:.1f} % of the pixels, but only {100 * a:.1f} % remain, its "
        "estimated true fraction, after reweighting by the estimated class frequencies. If that is too little, add "
        "scribbles or use prior=uniform."
        for name, b, a in zip(names, before, after, strict=True)
        if b >= _SEEN and a < _LEFT * b
    ]


def fractions(counts: np.ndarray, areas: Areas | None, names: Sequence[str], kind: str) -> dict[str, Any]:
    """Return the area fractions of an image for its record, among the pixels with data.

    Args:
        counts: (K + 1,) pixels of each label, the first without data.
        areas: estimated areas; None counts the labels.
        names: K class names.
        kind: kind of classifier; boosting is too overconfident for intervals.

    Returns:
        By class name, None if no pixel has data:

        - 'fractions': fraction of the area, from 0 to 1.
        - 'fractions_ci95': its 95 % interval [low, high]; None without an estimate, and for boosting. A class
          without pixels in the map has None instead of an interval.
        - 'map_fractions': fraction of the pixels of the label map, as shown in every figure.

        'fraction_kind': meaning of 'fractions', 'estimate' (of the true fractions of the image) or 'map' (equal to
        'map_fractions'). And 'priors': the class frequencies of each page, used to reweight the labels of that page.
    """
    total = int(counts[1:].sum())

    def fractions_of(pixels: np.ndarray) -> dict[str, float | None]:
        return {name: float(n / total) if total else None for name, n in zip(names, pixels, strict=True)}

    if areas is None:
        estimates = fractions_of(counts[1:])
        record = {"fractions": estimates, "fraction_kind": "map", "fractions_ci95": None}
        return {**record, "map_fractions": estimates, "priors": None}
    estimates, doubt = fractions_of(areas.pixels), fractions_of(areas.doubt)
    evidence = dict(zip(names, counts[1:] > 0, strict=True))
    intervals = None
    if kind in SPREADS:
        intervals = {n: list(interval(estimates[n], doubt[n], kind)) if evidence[n] else None for n in names}
    return {
        "fractions": estimates,
        "fraction_kind": "estimate",
        "fractions_ci95": intervals,
        "map_fractions": fractions_of(counts[1:]),
        "priors": [{n: float(v) for n, v in zip(names, prior, strict=True)} for prior in areas.priors],
    }


def image_record(
    image: ImageFacts,
    labels: Path | None,
    areas: Mapping[str, Any],
    *,
    no_data: float,
    uncertainty: float,
    overlap: int,
    disagreeing: int,
) -> dict[str, Any]:
    """Return the part of an image's record that is independent of how the image was read.

    Args:
        image: the image.
        labels: its label file.
        areas: areas of its classes, from `fractions`.
        no_data: fraction of the pixels without data, including excluded ones.
        uncertainty: mean over the pixels with data.
        overlap: number of pixels covered by several tiles.
        disagreeing: number of these for which two tiles predict different classes.
    """
    return {
        "image": str(image.path),
        "labels": None if labels is None else str(labels),
        "pages": image.n_pages,
        "height": image.shape[0],
        "width": image.shape[1],
        "channels": image.channels,
        "channel_names": list(image.channel_names),
        "pixel_size_um": image.pixel_size,
        "page_axes": image.axis_lengths,
        "z_step_um": image.z_step,
        "frame_interval_s": image.frame_interval,
        "orientation": {"tag": image.frame.tag, "applied": image.frame.applied},
        "no_data_share": no_data,
        "excluded_share": 0.0 if image.sample is None else float(1 - image.sample.mean()),
        **areas,
        "mean_uncertainty": uncertainty,
        "overlap_pixels": overlap,
        "tile_disagreement": disagreeing / overlap if overlap else None,
    }


def timing(seconds: float, pixels: int) -> dict[str, float]:
    """Return the computing time of an image for its record."""
    each = seconds / (pixels / 1e6)
    return {"seconds": round(seconds, 3), "seconds_per_megapixel": round(each, 3)}


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
