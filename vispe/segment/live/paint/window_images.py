"""PNG images of the paint window: the page, its labels and its uncertainty."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from vispe.segment.live.live_segmentation import Live
from vispe.segment.overlays import Color
from vispe.segment.types import Prediction

SIDE = 2048
"""Largest side in pixels of the image sent to the window; scribbles are in pixels of the original image."""


def shown_png(live: Live) -> bytes:
    """Return the page of a session as shown in the window, a PNG of at most `SIDE` pixels."""
    grey, valid = live.normalized()
    pixels = (np.where(valid[..., None], np.nan_to_num(grey), 0) * 255).round().astype(np.uint8)
    # other numbers of channels are shown as their mean, as in overlays
    pixels = pixels if pixels.shape[2] == 3 else pixels.mean(2).round().astype(np.uint8)
    return _png(_fitting(Image.fromarray(pixels), Image.Resampling.BOX))


def _png_text(image: Image.Image, resampling: Image.Resampling, **options: Any) -> str:
    """Return an image of at most `SIDE` pixels as a PNG in base64."""
    return base64.b64encode(_png(_fitting(image, resampling), **options)).decode()


def shown_result(prediction: Prediction, colors: Sequence[Color]) -> dict[str, Any]:
    """Return a result for the window, JSON-able.

    Args:
        prediction: the result.
        colors: colour of each class.

    Returns:
        'labels', the label map in the colours of the classes, and 'uncertainty', as PNGs in base64; 'fractions' of the
        label map by class.
    """
    palette = Image.fromarray(prediction.labels)
    palette.putpalette([0, 0, 0, *(int(v) for color in colors for v in color)])
    uncertainty = np.nan_to_num(prediction.uncertainty * 255).round().astype(np.uint8)
    counts = np.bincount(prediction.labels.ravel(), minlength=len(colors) + 1)[1:]
    total = max(int(counts.sum()), 1)
    return {
        "labels": _png_text(palette, Image.Resampling.NEAREST, transparency=0),
        "uncertainty": _png_text(Image.fromarray(uncertainty), Image.Resampling.BOX),
        "fractions": [int(n) / total for n in counts],
    }


def _fitting(image: Image.Image, resampling: Image.Resampling) -> Image.Image:
    """Downscale an image to at most `SIDE` pixels."""
    scale = SIDE / max(image.size)
    if scale >= 1:
        return image
    return image.resize((max(round(image.width * scale), 1), max(round(image.height * scale), 1)), resampling)


def _png(image: Image.Image, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG", compress_level=1, **options)
    return out.getvalue()
