"""Figures of results: the label map over the image with a legend and a scale bar, and uncertainty maps."""

from collections.abc import Sequence

import numpy as np

from vispe.errors import InputError, ShapeError, counted
from vispe.segment.overlays.figure_layout import compose, legend_rows, scale_bar, text_style
from vispe.segment.overlays.tint import PALETTE, Color, blended

SMALLEST = 480
"""Images with a longer side below this are enlarged by an integer factor, to match the size of the legend."""


def overlay(
    image: np.ndarray,
    labels: np.ndarray,
    names: Sequence[str],
    colors: Sequence[Color] | None = None,
    alpha: float = 0.4,
    pixel_size: tuple[float, float] | None = None,
    title: str | None = None,
    step: int = 1,
    counts: np.ndarray | None = None,
    legend: Sequence[str] | None = None,
) -> np.ndarray:
    """Draw a label map over its image, with class boundaries, a legend with area fractions and a scale bar.

    Pixels are not resampled; only images with a longer side below `SMALLEST` are enlarged, by an integer factor.
    Legend and scale bar are drawn outside the image.  Area fractions are proportions of the pixels with data.

    Args:
        image: (h, w) or (h, w, c) float in [0, 1]; 1 or 2 channels are shown as the grey of the first, more
            than 3 as the grey of their mean.
        labels: (h, w) integers: 0 = no data (not tinted), 1..K.
        names: the K class names.
        colors: K colours (r, g, b) in 0..255; default `PALETTE`.
        alpha: weight of the class colour, 0 to 1.
        pixel_size: microns per pixel (y, x); without it the scale bar counts pixels.
        title: a line above the image.
        step: each pixel of the arrays represents step x step pixels of the image, as counted by the scale bar.
        counts: (K + 1,) pixels of each label in the full image, if the arrays are a subset; for the legend.
        legend: K texts after the names in the legend, instead of the area fractions.

    Returns:
        (H, W, 3) uint8, larger than the image by the legend and the scale bar.

    Raises:
        ShapeError: `labels` and `image` differ in size.
        InputError: labels beyond the names, too few colours, or `alpha` outside [0, 1].
    """
    colors = _checked(image, labels, names, colors, alpha)
    h, w = labels.shape
    factor = max(1, -(-SMALLEST // max(h, w)))
    bands = blended(image, labels, colors, alpha, factor)
    style = text_style(max(h, w) * factor)
    if counts is None:
        counts = np.bincount(labels.ravel(), minlength=len(names) + 1)
    rows = (
        legend_rows(names, colors, counts)
        if legend is None
        else list(zip(colors, names, legend, strict=True))
    )
    bar = scale_bar(w * step, factor / step, pixel_size)
    return compose(style, (w * factor, h * factor), bands, rows, bar, title)


def uncertainty_image(unc: np.ndarray) -> np.ndarray:
    """Convert uncertainty (h, w) in [0, 1] to uint8 grey, 255 = undecided; NaN (no data) becomes 0.

    The scale is linear and the same for all images, so values can be recovered: grey / 255.

    Raises:
        ShapeError: not two-dimensional.
        InputError: values outside [0, 1].
    """
    if unc.ndim != 2:
        raise ShapeError(f"an uncertainty map must have shape (h, w), got {unc.shape}.")
    known = np.isfinite(unc)
    values = np.where(known, unc, 0)
    if values.size and (values.min() < -1e-6 or values.max() > 1 + 1e-6):
        raise InputError(f"uncertainty must be in [0, 1], got {values.min():g} to {values.max():g}.")
    return np.rint(np.clip(values, 0, 1) * 255).astype(np.uint8)


def _checked(
    image: np.ndarray, labels: np.ndarray, names: Sequence[str], colors: Sequence[Color] | None, alpha: float
) -> Sequence[Color]:
    if labels.ndim != 2 or image.ndim not in (2, 3) or image.shape[:2] != labels.shape:
        raise ShapeError(f"the image has shape {image.shape}, but the labels have {labels.shape}.")
    if labels.size == 0:
        raise ShapeError(f"the label map is empty, got shape {labels.shape}.")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high > len(names):
        raise InputError(
            f"the labels contain {low if low < 0 else high}, but there are {len(names)} class names."
        )
    if not 0 <= alpha <= 1:
        raise InputError(f"alpha={alpha:g} must be between 0 and 1.")
    colors = [PALETTE[i % len(PALETTE)] for i in range(len(names))] if colors is None else list(colors)
    if len(colors) < len(names):
        raise InputError(
            f"got {counted(len(colors), 'colour')} for {counted(len(names), 'class')}. Pass one colour per class."
        )
    return colors[: len(names)]
