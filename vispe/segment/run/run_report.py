"""What a run reports: events while it goes on, one record per image, and the report at the end."""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vispe.files import write_csv, write_json
from vispe.segment.classify.class_prior import interval
from vispe.segment.features.pixel_features import Features
from vispe.segment.materials.image_record import table_row
from vispe.segment.metrics import summarize
from vispe.segment.model.model_file import Model, versions
from vispe.segment.objects.sizes import of_batch
from vispe.segment.run.html_report import write_page
from vispe.segment.run.prediction import Areas, Post

if TYPE_CHECKING:
    from vispe.images.read import Micrograph
    from vispe.segment.out_of_core.image_source import BigImage

_SCORES = ("miou", "mean_dice", "mean_boundary_f1", "pixel_accuracy", "balanced_accuracy")
_SEEN, _LEFT = 0.05, 0.1  # shares of the pixels, and of these, from which on a class has faded
_TRUST = ("dependence", "agreement", "spread_pp", "floor_pp")
_COLUMNS = ("image", "pages", "height", "width", "seconds", "mean_uncertainty", "tile_disagreement")
_ERRORS = ("phase_fraction_mean_abs_error_pp", "fraction_mean_abs_error_pp")


class Watcher:
    """Its methods are called as a run goes on; these do nothing."""

    def start(self, what: str, total: int) -> None:
        """Called when a part of the run begins, with `total` images to go."""

    def step(self, share: float) -> None:
        """Called when a share of one image is done; the shares of an image sum to 1."""

    def note(self, text: str) -> None:
        """Called with something that the user should know."""

    def done(self, record: Mapping[str, Any]) -> None:
        """Called when an image and all its files are complete."""

    def failed(self, path: str, reason: str) -> None:
        """Called when an image of a batch could not be used."""


@dataclass
class Report:
    """The result of a run.

    Attributes:
        run: what was run with what, JSON-able.
        images: one record for each finished image.
        failures: `{'image': path, 'reason': text}` for each image that could not be used.
        notes: what the user should know about the whole run.
        peak_memory_mb: largest memory of the process so far; of the GPU, where one was used.
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
        """Summarise each score over the images that have a truth: mean, median, std, worst, interval."""
        scored = [record["scores"] for record in self.images if "scores" in record]
        if not scored:
            return {}
        keys = [(key, True) for key in _SCORES]
        keys += [(key, False) for key in _ERRORS if all(key in s for s in scored)]
        if any("adjusted_rand" in s for s in scored):
            keys.append(("adjusted_rand", True))
        return {key: summarize(scored, key, higher_is_better=up) for key, up in keys}

    def as_dict(self) -> dict[str, Any]:
        """Return everything as a JSON-able dict."""
        objects = of_batch(self.images)
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
        """Write `report.json` and `report.csv` into `folder`, in place of earlier ones of this run."""
        self.peak_memory_mb = peak_memory()
        write_json(folder / "report.json", self.as_dict(), force=True)
        if self.images:
            error = self.run.get("training", {}).get("calibration", {}).get("expected_calibration_error")
            write_csv(folder / "report.csv", [_row(record, error) for record in self.images], force=True)

    def finish(self, folder: Path) -> None:
        """Write the page of the whole run, `report.html`."""
        write_page(folder, self.as_dict())


class Clock:
    """Measures the seconds since it was made."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def __call__(self) -> float:
        """Return the seconds so far."""
        return time.perf_counter() - self._start


def peak_memory() -> dict[str, float]:
    """Return the largest memory used so far in MB: of the process, and of the GPU where one was used."""
    out: dict[str, float] = {}
    if sys.platform != "win32":
        import resource

        unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, kilobytes elsewhere
        out["process"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6, 1)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        out["gpu"] = round(torch.cuda.max_memory_allocated() / 1e6, 1)
    return out


def described(features: Features, model: Model, post: Post) -> dict[str, Any]:
    """Return what the report says of a run: features, classifier, classes, settings; JSON-able."""
    config = vars(features.config)
    return {
        "model": features.config.model or "filters",
        "features": {key: list(v) if isinstance(v, tuple) else v for key, v in config.items()},
        "classifier": model.classifier.kind,
        "classes": list(model.names),
        "normalize": model.normalize,
        "clip": list(model.clip),
        "post": {**vars(post), "prior": post.weighing(model.classifier)},
        "training": dict(model.notes),
        "seed": model.seed,
        "device": features.device,
        "versions": versions(),
    }


def faded(areas: Areas | None, names: Sequence[str]) -> list[str]:
    """Return a note for each class that weighing takes nearly all of its pixels from.

    So it is with a class that is really rare, and with classes that can hardly be told apart: there the estimate of
    their frequencies runs to one of them.

    Args:
        areas: what was estimated; None for nothing.
        names: K class names.
    """
    if areas is None or not (total := areas.pixels.sum()):
        return []
    before, after = areas.unweighed / total, areas.pixels / total
    return [
        f"{100 * b:.1f} % of the pixels look most like {name!r}, but {100 * a:.1f} % are left to it, its estimated "
        "true fraction, once classes are weighed by their estimated frequency; where that is too little, draw more "
        "strokes or take --prior uniform."
        for name, b, a in zip(names, before, after, strict=True)
        if b >= _SEEN and a < _LEFT * b
    ]


def fractions(counts: np.ndarray, areas: Areas | None, names: Sequence[str], kind: str) -> dict[str, Any]:
    """Return what a record says about the area of each class among the pixels with data.

    Args:
        counts: (K + 1,) pixels of each label, the first those without data.
        areas: what was estimated; None counts the labels.
        names: K class names.
        kind: of the classifier. Boosting is far too sure of its pixels for an interval: half of those that were
            measured missed the truth.

    Returns:
        By class name, None where no pixel has data:

        - 'fractions': share of the area, from 0 to 1.
        - 'fractions_ci95': its 95 % interval [low, high]; None where nothing was estimated, and for boosting. A class
          without evidence, which has no pixel of the map, has None in place of an interval.
        - 'map_fractions': share of the pixels of the label map, which every figure shows.

        'fraction_kind': what 'fractions' are, 'estimate' (of the true fractions of the image) or 'map' (equal to
        'map_fractions'). And 'priors': the frequency of each class on each page, with which the labels of that page
        were weighed.
    """
    total = int(counts[1:].sum())

    def shares(pixels: np.ndarray) -> dict[str, float | None]:
        return {name: float(n / total) if total else None for name, n in zip(names, pixels, strict=True)}

    if areas is None:
        found = shares(counts[1:])
        whole = {"fractions": found, "fraction_kind": "map", "fractions_ci95": None}
        return {**whole, "map_fractions": found, "priors": None}
    found, doubt = shares(areas.pixels), shares(areas.doubt)
    evidence = dict(zip(names, counts[1:] > 0, strict=True))
    ends = {n: list(interval(found[n], doubt[n])) if evidence[n] else None for n in names}
    return {
        "fractions": found,
        "fraction_kind": "estimate",
        "fractions_ci95": None if kind == "boosting" else ends,
        "map_fractions": shares(counts[1:]),
        "priors": [{n: float(v) for n, v in zip(names, prior, strict=True)} for prior in areas.priors],
    }


def record_of(
    image: "Micrograph | BigImage",
    labels: Path | None,
    shares: Mapping[str, Any],
    *,
    no_data: float,
    uncertainty: float,
    overlap: int,
    disagreeing: int,
) -> dict[str, Any]:
    """Return the record of an image, as far as it does not depend on how the image was read.

    Args:
        image: the image.
        labels: its label file.
        shares: the areas of its classes, from `fractions`.
        no_data: share of the pixels without data, excluded ones among them.
        uncertainty: mean over the pixels with data.
        overlap: pixels in several tiles.
        disagreeing: of these, those to which two tiles give different classes.
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
        **shares,
        "mean_uncertainty": uncertainty,
        "overlap_pixels": overlap,
        "tile_disagreement": disagreeing / overlap if overlap else None,
    }


def timed(seconds: float, pixels: int) -> dict[str, float]:
    """Return what a record says about the time that an image took."""
    each = seconds / (pixels / 1e6)
    return {"seconds": round(seconds, 3), "seconds_per_megapixel": round(each, 3)}


def _row(record: Mapping[str, Any], calibration_error: float | None) -> dict[str, Any]:
    """Flatten a record to one line of the table."""
    scores = record.get("scores", {})
    row = {key: record[key] for key in _COLUMNS} | {"map_fraction": record["map_fractions"]}
    row |= {"fraction_kind": record["fraction_kind"], "fraction": record["fractions"]}
    if record["priors"] is not None:
        for place, end in enumerate(("low", "high")):
            ends = {name: e and e[place] for name, e in (record["fractions_ci95"] or {}).items()}
            row[f"fraction_{end}"] = ends
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
