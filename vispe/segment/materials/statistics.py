"""Stereological measures of a label map, with intervals from blocks of the page."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vispe.errors import InputError
from vispe.segment.materials.correlation import two_point_correlation
from vispe.segment.materials.crossings import Crossings, count_crossings, grain_size_number
from vispe.segment.materials.directions import ANGLES, Directions

Record = dict[str, Any]

_MM = 1000  # microns
_ISOTROPIC = 1e-9  # anisotropy relative to the crossings below which no direction is preferred


def measure(
    labels: np.ndarray, names: Sequence[str], pixel_size: tuple[float, float] | None = None
) -> tuple[Record, list[Record]]:
    """Measure intercepts, grain size, interfaces, correlation and elongation on one page.

    Lengths are in microns with `pixel_size`, else in pixels. 95 % intervals are estimated from the blocks of the page
    (up to 16) by leave-one-out (jackknife of the logarithm, Student's t); None for too few blocks.

    Args:
        labels: (h, w) integers, 1..K; 0 = no data, which is ignored.
        names: K class names.
        pixel_size: microns (y, x).

    Returns:
        The record, JSON-able: 'unit', 'blocks', 'patches' for boundaries between any two classes and 'classes' by
        name, each with

        - 'mean_intercept': L / P for patches, 2 V L / P for a class of fraction V, P crossings on lines of length L;
          'mean_intercept_ci95'; 'relative_accuracy_percent', half of that interval, as in ASTM E112.
        - 'grain_size_number' G of ASTM E112 and 'grain_size_number_ci95'; None without `pixel_size`.
        - 'boundary_per_area' B_A = pi/2 P_L and 'surface_per_volume' S_V = 2 P_L = 4/pi B_A, with '..._ci95'.
        - 'rose': 'degrees' (counter-clockwise from the horizontal) and 'mean_intercept' along them, None without
          crossings.
        - 'elongation': 'degrees' of the longest intercepts, 'ratio' of intercepts along and across, 'ratio_ci95'.
        - of classes, 'specific_surface_from_correlation', S_V from the slope of S2 at 0.

        And the curves as table rows: 'two_point_correlation' of each class over distance, and 'mean_intercept'
        over degrees.

    Raises:
        ShapeError: not one page.
        InputError: no data, too few names, or a page below 8 px along a side.

    Example:
        >>> stripes = np.arange(64)[None].repeat(64, 0) // 8 % 2 + 1
        >>> record, curves = measure(stripes, ["dark", "bright"], (0.5, 0.5))
        >>> record["unit"], round(record["classes"]["dark"]["rose"]["mean_intercept"][0], 1)
        ('um', 4.5)
    """
    pixel = (1.0, 1.0) if pixel_size is None else pixel_size
    directions, counts = Directions(pixel), count_crossings(labels, len(names))
    if not counts.pixels.any():
        raise InputError("no pixel of the page has data. Pass a page with labelled pixels.")
    unit = "px" if pixel_size is None else "um"
    record: Record = {"unit": unit, "blocks": len(_used(counts).pixels), "patches": {}, "classes": {}}
    curves: list[Record] = []
    for k, name in enumerate([None, *names]):
        measures = _of(counts, directions, k, unit)
        if name is None:
            record["patches"] = measures
        else:
            inside = labels == k
            s2 = two_point_correlation(inside, labels > 0, pixel)
            surface = s2.specific_surface if inside.any() and not inside[labels > 0].all() else math.nan
            record["classes"][name] = {**measures, "specific_surface_from_correlation": _finite(surface)}
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
        rose = measures["rose"]
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
    """Return the measures of all patches (k = 0) or of class k."""
    counts = _used(counts)

    def per_length(subset: Crossings, weights: np.ndarray) -> np.ndarray:
        """Return crossings per length, for weights (..., 16) of the directions."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return weights @ (subset.changes[..., k].sum(0) / subset.steps.sum(0))

    def length_per_crossing(subset: Crossings) -> float:
        """Return the intercept length per crossing, as a fraction of all length; every intercept has two ends."""
        pixels = subset.pixels.sum(0)
        return 1.0 if k == 0 else float(2 * pixels[k - 1] / pixels.sum())

    def intercept(subset: Crossings) -> float:
        return _ratio(length_per_crossing(subset), float(per_length(subset, directions.mean)))

    length, low, high = _interval(counts, intercept)
    # P_L: crossings per length of test line, averaged over angles
    crossings = per_length(counts, directions.mean)
    boundaries_per_length, lowest, highest = _interval(
        counts, lambda subset: float(per_length(subset, directions.mean))
    )
    along = per_length(counts, directions.at(np.array(ANGLES)))
    measures: Record = {
        "mean_intercept": length,
        "mean_intercept_ci95": _pair(low, high),
        "relative_accuracy_percent": None if low is None or not length else 50 * (high - low) / length,
        **_grain(length, low, high, unit),
    }
    # stereology: B_A = pi / 2 P_L and S_V = 2 P_L
    for name, factor in (("boundary_per_area", math.pi / 2), ("surface_per_volume", 2.0)):
        measures[name] = (
            _finite(factor * float(crossings))
            if boundaries_per_length is None
            else factor * boundaries_per_length
        )
        measures[f"{name}_ci95"] = _pair(
            *(None if bound is None else factor * bound for bound in (lowest, highest))
        )
    measures["rose"] = {
        "degrees": list(ANGLES),
        "mean_intercept": [_finite(_ratio(length_per_crossing(counts), float(p))) for p in along],
    }
    return {**measures, "elongation": _elongation(counts, per_length, directions, along)}


def _grain(length: float | None, low: float | None, high: float | None, unit: str) -> Record:
    """Return G of an intercept and its interval; longer intercepts have a smaller G."""
    value, smallest, largest = (
        None if intercept is None or unit != "um" else grain_size_number(intercept / _MM)
        for intercept in (length, high, low)
    )
    return {"grain_size_number": value, "grain_size_number_ci95": _pair(smallest, largest)}


def _elongation(
    counts: Crossings,
    per_length: Callable[[Crossings, np.ndarray], np.ndarray],
    directions: Directions,
    along: np.ndarray,
) -> Record:
    """Return the direction of the longest intercepts, and their ratio to those across."""
    # crossings are fewest along the elongation, perpendicular to the phase of their second harmonic
    harmonic = np.sum(along * np.exp(2j * np.radians(ANGLES)))
    if not np.isfinite(harmonic) or abs(harmonic) <= _ISOTROPIC * along.sum():
        return {"degrees": None, "ratio": None, "ratio_ci95": None}
    # the second harmonic has twice the angle; +90 from fewest to most intercept length
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
    """Return a positive number and its 95 % interval from the blocks; None if undefined."""
    from scipy.stats import t

    estimate = number(counts)
    blocks = len(counts.pixels)
    if not (math.isfinite(estimate) and estimate > 0):
        return None, None, None
    if blocks < 4:
        return estimate, None, None
    leave_one_out = [number(_select_blocks(counts, np.arange(blocks) != i)) for i in range(blocks)]
    if not all(math.isfinite(x) and x > 0 for x in leave_one_out):
        return estimate, None, None
    # jackknife standard error of the logarithm
    logs = np.log(leave_one_out)
    error = math.sqrt((blocks - 1) / blocks * float(np.sum((logs - logs.mean()) ** 2)))
    # symmetric interval of the logarithm: divide and multiply by a factor
    factor = math.exp(float(t.ppf(0.975, blocks - 1)) * error)
    return estimate, estimate / factor, estimate * factor


def _used(counts: Crossings) -> Crossings:
    """Return the blocks with data."""
    return _select_blocks(counts, counts.pixels.sum(1) > 0)


def _select_blocks(counts: Crossings, blocks: np.ndarray) -> Crossings:
    return Crossings(counts.pixels[blocks], counts.steps[blocks], counts.changes[blocks])


def _ratio(above: float, below: float) -> float:
    return above / below if below > 0 else math.nan


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _pair(low: float | None, high: float | None) -> list[float] | None:
    return None if low is None or high is None else [low, high]
