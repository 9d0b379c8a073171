"""Record of an image: its area fractions, metadata and computing time."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vispe.segment.classify.class_prior import SPREADS, interval
from vispe.segment.types import Areas, ImageFacts

# a class has vanished if its area before reweighting exceeds the first fraction of the pixels, and reweighting
# leaves less than the second fraction of that area
_SEEN, _LEFT = 0.05, 0.1


class Clock:
    """Stopwatch: returns the seconds since it was created."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def __call__(self) -> float:
        """Return the seconds so far."""
        return time.perf_counter() - self._start


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
