"""Intensity normalisation to [0, 1] with grey limits of a page, a stack, or the dtype."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, get_args

import numpy as np

from vispe.errors import InputError, OptionError
from vispe.images.formats.size_limits import enough_memory
from vispe.images.read import Micrograph
from vispe.utils.interval import Interval
from vispe.utils.options import checked

Normalization = Literal["stack", "image", "none"]
MODES: tuple[Normalization, ...] = get_args(Normalization)
Percentile = Annotated[float, Interval(least=0, most=100)]
Percentiles = tuple[Percentile, Percentile]


@checked
def normalize(
    m: Micrograph, mode: Normalization = "stack", clip: Percentiles = (0.5, 99.5)
) -> tuple[np.ndarray, list[str]]:
    """Scale intensities to [0, 1].

    All channels have the same limits, so that hues are preserved. Pixels without data are excluded from the
    percentiles and become 0.

    Args:
        m: the image.
        mode: 'stack' computes one pair of percentiles over all pages, 'image' one pair per page; 'none' divides
            integers by the maximum of their dtype and requires floats in [0, 1].
        clip: lower and upper percentile that are mapped to 0 and 1; used by 'stack' and 'image'.

    Returns:
        Float32 (z, h, w, c), and notes, for example that a page is constant (its values are then all 0).

    Raises:
        OptionError: unknown `mode`, or `clip` not 0 <= low < high <= 100.
        InputError: values outside of the range of mode 'none'.
    """
    low, high = clip
    if not low < high:
        raise OptionError(f"clip must be two percentiles with 0 <= low < high <= 100, got {low:g},{high:g}.")
    notes: list[str] = []
    if mode == "none":
        return _by_type(m), notes
    groups = [slice(0, m.n_pages)] if mode == "stack" else [slice(i, i + 1) for i in range(m.n_pages)]
    with enough_memory(m.path):
        out = np.zeros(m.pages.shape, np.float32)
        for group in groups:
            where = m.path.name if len(groups) == 1 else f"page {group.start} of {m.path.name}"
            limits = _limits(m.pages[group], m.valid[group], clip, where, notes)
            for i in range(*group.indices(m.n_pages)):
                if limits is not None:
                    out[i] = unit_range(m.pages[i], m.valid[i], *limits)
    return out, notes


def _limits(
    pages: np.ndarray, valid: np.ndarray, clip: tuple[float, float], where: str, notes: list[str]
) -> tuple[float, float] | None:
    values = pages[valid] if not valid.all() else pages.reshape(-1)
    if values.size == 0:
        notes.append(f"{where} holds no data.")
        return None
    if values.dtype == np.float16:
        values = values.astype(np.float32)
    # a range that overflows float64 is rejected by `grey_range`
    with np.errstate(over="ignore", invalid="ignore"):
        low, high = (float(v) for v in np.percentile(values, clip))
    return grey_range(low, high, lambda: (float(values.min()), float(values.max())), clip, where, notes)


def grey_range(
    low: float,
    high: float,
    ends: Callable[[], tuple[float, float]],
    clip: tuple[float, float],
    where: str,
    notes: list[str],
) -> tuple[float, float] | None:
    """Return the grey limits: the percentiles if distinct, otherwise minimum and maximum; None for constant images.

    Raises:
        InputError: the range of values overflows float64.
    """
    if low < high and np.isfinite(high - low):
        return low, high
    low, high = ends()
    if not np.isfinite(high - low):
        raise InputError(
            f"{where}: the range of values overflows float64, got {low:g} to {high:g}. Rescale them."
        )
    if low == high:
        notes.append(f"{where} is constant (every value is {low:g}): there are no classes to separate.")
        return None
    notes.append(
        f"the {clip[0]:g} and {clip[1]:g} percentiles of {where} are equal: the full range {low:g} to "
        f"{high:g} is used."
    )
    return low, high


def unit_range(page: np.ndarray, valid: np.ndarray, low: float, high: float) -> np.ndarray:
    """Map `low` to 0 and `high` to 1, as float32; values beyond are clipped, pixels without data become 0."""
    kind = np.float32 if page.dtype.itemsize <= 2 else np.float64
    with np.errstate(invalid="ignore", over="ignore"):
        out = (page.astype(kind) - kind(low)) / kind(high - low)
    out = np.clip(out, 0, 1).astype(np.float32)
    out[~valid] = 0
    return out


def _by_type(m: Micrograph) -> np.ndarray:
    values = m.pages[m.valid]
    top = type_top(m.path, m.pages.dtype, values.min(), values.max())
    return np.stack([unit_range(p, v, 0.0, top) for p, v in zip(m.pages, m.valid, strict=True)])


def type_top(path: Path, dtype: np.dtype, lowest: float, highest: float) -> float:
    """Return the grey level that mode 'none' maps to 1: the maximum of an integer dtype, 1 for floats.

    Raises:
        InputError: values from `lowest` to `highest` are not within 0 and that level.
    """
    maximum = float(np.iinfo(dtype).max) if dtype.kind in "ui" else 1.0
    if lowest < 0 or highest > maximum:
        raise InputError(
            f"{path}: normalize=none needs values from 0 to {maximum:g}, got {lowest:g} to {highest:g}. Use "
            "normalize=stack or normalize=image."
        )
    return maximum
