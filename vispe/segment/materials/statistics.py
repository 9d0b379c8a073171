"""The materials numbers of a label map, with intervals from blocks of the page."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vispe.errors import InputError
from vispe.segment.materials.correlation import two_point_correlation
from vispe.segment.materials.crossings import Crossings, count_crossings
from vispe.segment.materials.directions import ANGLES, Directions
from vispe.segment.materials.grain_size import grain_size_number

Record = dict[str, Any]

_MM = 1000  # microns
_ALIKE = 1e-9  # share of the crossings below which no direction is preferred


def measure(
    labels: np.ndarray, names: Sequence[str], pixel_size: tuple[float, float] | None = None
) -> tuple[Record, list[Record]]:
    """Measure intercepts, grain size, interfaces, correlation and elongation on one page.

    Lengths are in microns with `pixel_size`, else in pixels. Intervals hold 95 % and come from the blocks of the page
    (up to 16), each left out in turn (jackknife of the logarithm, Student's t); None where blocks are too few.

    Args:
        labels: (h, w) integers, 1..K; 0 = no data, which is left out.
        names: K class names.
        pixel_size: microns (y, x).

    Returns:
        The record, JSON-able: 'unit', 'blocks', 'patches' for boundaries between any two classes and 'classes' by
        name, each with

        - 'mean_intercept': L / P for patches, 2 V L / P for a class of fraction V, P crossings on lines of length L;
          'mean_intercept_ci95'; 'relative_accuracy_percent', half of that interval, as in ASTM E112.
        - 'grain_size_number' G of ASTM E112 and 'grain_size_number_ci95'; None without `pixel_size`.
        - 'boundary_per_area' B_A = pi/2 P_L and 'surface_per_volume' S_V = 2 P_L = 4/pi B_A, with '..._ci95'.
        - 'rose': 'degrees' (counter-clockwise from the horizontal) and 'mean_intercept' along them, None beyond what
          crosses a boundary.
        - 'elongation': 'degrees' of the longest intercepts, 'ratio' of intercepts along and across, 'ratio_ci95'.
        - of classes, 'specific_surface_from_correlation', S_V from the slope of S2 at 0.

        And the curves as rows of a table: 'two_point_correlation' of each class over distance, and 'mean_intercept'
        over degrees.

    Raises:
        ShapeError: not one page.
        InputError: names that are too few, or a page below 8 px along a side.

    >>> stripes = np.arange(64)[None].repeat(64, 0) // 8 % 2 + 1
    >>> record, curves = measure(stripes, ["dark", "bright"], (0.5, 0.5))
    >>> record["unit"], round(record["classes"]["dark"]["rose"]["mean_intercept"][0], 1)
    ('um', 4.5)
    """
    pixel = (1.0, 1.0) if pixel_size is None else pixel_size
    directions, counts = Directions(pixel), count_crossings(labels, len(names))
    if not counts.pixels.any():
        raise InputError("no pixel of the page holds data; there is nothing to measure.")
    unit = "px" if pixel_size is None else "um"
    record: Record = {"unit": unit, "blocks": len(_used(counts).pixels), "patches": {}, "classes": {}}
    curves: list[Record] = []
    for k, name in enumerate([None, *names]):
        found = _of(counts, directions, k, unit)
        if name is None:
            record["patches"] = found
        else:
            inside = labels == k
            s2 = two_point_correlation(inside, labels > 0, pixel)
            surface = s2.specific_surface if inside.any() and not inside[labels > 0].all() else math.nan
            record["classes"][name] = {**found, "specific_surface_from_correlation": _finite(surface)}
            curves += [
                {
                    "class": name,
                    "curve": "two_point_correlation",
                    "at": r,
                    "at_unit": unit,
                    "value": _finite(v),
                }
                for r, v in zip(s2.distance, s2.value, strict=True)
            ]
        rose = found["rose"]
        curves += [
            {
                "class": name or "all patches",
                "curve": "mean_intercept",
                "at": a,
                "at_unit": "degrees",
                "value": v,
            }
            for a, v in zip(rose["degrees"], rose["mean_intercept"], strict=True)
        ]
    return record, curves


def _of(counts: Crossings, directions: Directions, k: int, unit: str) -> Record:
    """Return the numbers of all patches (k = 0) or of a class."""
    counts = _used(counts)

    def per_length(some: Crossings, weights: np.ndarray) -> np.ndarray:
        """Crossings per length, for weights (..., 16) of the directions."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return weights @ (some.changes[..., k].sum(0) / some.steps.sum(0))

    def ends(some: Crossings) -> float:
        """Intercepts' length, as a share of all length, for each crossing: every intercept has two ends."""
        pixels = some.pixels.sum(0)
        return 1.0 if k == 0 else float(2 * pixels[k - 1] / pixels.sum())

    def intercept(some: Crossings) -> float:
        return _ratio(ends(some), float(per_length(some, directions.mean)))

    length, low, high = _interval(counts, intercept)
    crossings = per_length(counts, directions.mean)
    between, least, most = _interval(counts, lambda some: float(per_length(some, directions.mean)))
    along = per_length(counts, directions.at(np.array(ANGLES)))
    found: Record = {
        "mean_intercept": length,
        "mean_intercept_ci95": _pair(low, high),
        "relative_accuracy_percent": None if low is None or not length else 50 * (high - low) / length,
        **_grain(length, low, high, unit),
    }
    for name, factor in (("boundary_per_area", math.pi / 2), ("surface_per_volume", 2.0)):
        found[name] = _finite(factor * float(crossings)) if between is None else factor * between
        found[f"{name}_ci95"] = _pair(*(None if end is None else factor * end for end in (least, most)))
    found["rose"] = {
        "degrees": list(ANGLES),
        "mean_intercept": [_finite(_ratio(ends(counts), float(p))) for p in along],
    }
    return {**found, "elongation": _elongation(counts, per_length, directions, along)}


def _grain(length: float | None, low: float | None, high: float | None, unit: str) -> Record:
    """Return G of an intercept and its interval; long intercepts have a small G."""
    whole, smallest, largest = (
        None if value is None or unit != "um" else grain_size_number(value / _MM)
        for value in (length, high, low)
    )
    return {"grain_size_number": whole, "grain_size_number_ci95": _pair(smallest, largest)}


def _elongation(
    counts: Crossings,
    per_length: Callable[[Crossings, np.ndarray], np.ndarray],
    directions: Directions,
    along: np.ndarray,
) -> Record:
    """Return the direction of the longest intercepts, and how much longer they are than those across."""
    # crossings are fewest along what is elongated: across their second harmonic
    harmonic = np.sum(along * np.exp(2j * np.radians(ANGLES)))
    if not np.isfinite(harmonic) or abs(harmonic) <= _ALIKE * along.sum():
        return {"degrees": None, "ratio": None, "ratio_ci95": None}
    degrees = float((math.degrees(np.angle(harmonic)) / 2 + 90) % 180)
    weights = directions.at(np.array([degrees, degrees + 90]))

    def ratio(some: Crossings) -> float:
        lengthwise, across = per_length(some, weights)
        return _ratio(float(across), float(lengthwise))

    value, low, high = _interval(counts, ratio)
    return {"degrees": degrees, "ratio": value, "ratio_ci95": _pair(low, high)}


def _interval(
    counts: Crossings, number: Callable[[Crossings], float]
) -> tuple[float | None, float | None, float | None]:
    """Return a positive number and its 95 % interval from the blocks, None where there is none."""
    from scipy.stats import t

    whole = number(counts)
    blocks = len(counts.pixels)
    if not (math.isfinite(whole) and whole > 0):
        return None, None, None
    if blocks < 4:
        return whole, None, None
    left = [number(_kept(counts, np.arange(blocks) != i)) for i in range(blocks)]
    if not all(math.isfinite(x) and x > 0 for x in left):
        return whole, None, None
    # what leaving out one block does to the logarithm, and so to all of them
    logs = np.log(left)
    error = math.sqrt((blocks - 1) / blocks * float(np.sum((logs - logs.mean()) ** 2)))
    factor = math.exp(float(t.ppf(0.975, blocks - 1)) * error)
    return whole, whole / factor, whole * factor


def _used(counts: Crossings) -> Crossings:
    """Return the blocks that hold data."""
    return _kept(counts, counts.pixels.sum(1) > 0)


def _kept(counts: Crossings, blocks: np.ndarray) -> Crossings:
    return Crossings(counts.pixels[blocks], counts.steps[blocks], counts.changes[blocks])


def _ratio(above: float, below: float) -> float:
    return above / below if below > 0 else math.nan


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _pair(low: float | None, high: float | None) -> list[float] | None:
    return None if low is None or high is None else [low, high]
