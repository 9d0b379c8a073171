"""Figure of the objects of an image: outlines over the image, with numbers where these are legible."""

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw

from vispe.segment.objects.table import Row
from vispe.segment.overlays import SMALLEST, Color, enlarged, lettering

_NUMBERED = 200
"""Largest number of objects on the page that still have their numbers drawn."""


def outlined(
    image: np.ndarray,
    instances: np.ndarray,
    rows: Sequence[Row],
    names: Sequence[str],
    colors: Sequence[Color],
) -> np.ndarray:
    """Draw the outlines of the objects of a page in the colours of their classes.

    Args:
        image: (h, w, c) float in [0, 1].
        instances: (h, w) numbers of the objects, 0 = none.
        rows: of the table, of all objects.
        names: of the K classes.
        colors: (r, g, b) in 0..255 of the K classes.

    Returns:
        (H, W, 3) uint8; images below `SMALLEST` along their longer side are enlarged by a whole factor.
    """
    factor = max(1, -(-SMALLEST // max(instances.shape)))
    large = instances.repeat(factor, 0).repeat(factor, 1)
    edge = np.zeros(large.shape, bool)
    for axis in (0, 1):
        values, mark = large.swapaxes(0, axis), edge.swapaxes(0, axis)
        mark[1:] |= values[1:] != values[:-1]
        mark[:-1] |= values[1:] != values[:-1]
    edge &= large > 0
    table = np.zeros((int(instances.max()) + 1, 3), np.uint8)
    present = np.zeros(len(table), bool)
    present[np.unique(instances)] = True
    for row in rows:
        if row["object"] < len(table) and present[row["object"]]:
            table[row["object"]] = colors[names.index(row["class"])]
    drawn = enlarged(image, factor)
    drawn[edge] = table[large[edge]]
    if not 0 < present[1:].sum() <= _NUMBERED:
        return drawn
    shown = Image.fromarray(drawn)
    pen, font = ImageDraw.Draw(shown), lettering(max(large.shape) // 2)
    for row in rows:
        if row["object"] < len(table) and present[row["object"]]:
            place = [factor * (row[f"centroid_{axis}_px"] + 0.5) for axis in "xy"]
            pen.text(place, str(row["object"]), fill=(255, 255, 255), font=font, anchor="mm", stroke_width=1,
                     stroke_fill=(0, 0, 0))  # fmt: skip
    return np.asarray(shown)
