"""Figure of the objects of an image: outlines over the image, numbered if there are few enough."""

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw

from vispe.segment.objects.table import Row
from vispe.segment.overlays import SMALLEST, Color, text_style, to_rgb

_NUMBERED = 200
"""Largest number of objects on a page that are numbered."""


def draw_outlines(
    image: np.ndarray,
    instances: np.ndarray,
    rows: Sequence[Row],
    names: Sequence[str],
    colors: Sequence[Color],
) -> np.ndarray:
    """Draw the outlines of the objects of a page in the colours of their classes.

    Args:
        image: (h, w, c) float in [0, 1].
        instances: (h, w) object numbers, 0 = none.
        rows: table rows of all objects.
        names: names of the K classes.
        colors: (r, g, b) in 0..255 of the K classes.

    Returns:
        (H, W, 3) uint8; images below `SMALLEST` along their longer side are enlarged by an integer factor.
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
    canvas = to_rgb(image, factor)
    canvas[edge] = table[large[edge]]
    if not 0 < present[1:].sum() <= _NUMBERED:
        return canvas
    figure = Image.fromarray(canvas)
    pen, font = ImageDraw.Draw(figure), text_style(max(large.shape) // 2).bold
    for row in rows:
        if row["object"] < len(table) and present[row["object"]]:
            position = [factor * (row[f"centroid_{axis}_px"] + 0.5) for axis in "xy"]
            pen.text(position, str(row["object"]), fill=(255, 255, 255), font=font, anchor="mm", stroke_width=1,
                     stroke_fill=(0, 0, 0))  # fmt: skip
    return np.asarray(figure)
