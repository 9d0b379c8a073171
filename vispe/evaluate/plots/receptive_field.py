"""Figure of an effective receptive field; matplotlib is imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vispe.evaluate.effective_receptive_field import EffectiveReceptiveField
from vispe.utils.report.figure_style import (
    BLUE,
    DASHED,
    GREY,
    INK,
    figure_title,
    finish_axes,
    hide_axes,
    new_figure,
    scale,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DECADES = 4  # orders of magnitude of the colour scale


def plot_receptive_field(field: EffectiveReceptiveField, title: str = "") -> Figure:
    """Plot the influence of every pixel with the circles of 50 % and 95 %, and the influence by distance.

    Args:
        field: return value of `effective_receptive_field`.
        title: such as the name of the model.

    Returns:
        The figure; save it with `figure.savefig(path)`.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    from matplotlib.colors import LogNorm
    from matplotlib.patches import Circle

    figure = new_figure(11, 5.6)
    name = f"Effective receptive field: {title}" if title else "Effective receptive field"
    figure.suptitle(name, size=13, color=INK, x=0.02, ha="left", parse_math=False)
    image_axes, curve = figure.subplots(1, 2)
    relative = field.influence * field.influence.size
    high = float(relative.max())
    norm = LogNorm(max(high, 1.0) * 10.0**-DECADES, max(high, 1.0))
    shown = image_axes.imshow(np.maximum(relative, norm.vmin), cmap="magma", norm=norm)
    reaches = field.reach.mean(0)
    for reach, style in zip(reaches, ("-", DASHED), strict=True):
        circle = Circle(field.center[::-1], reach, fill=False, color="white", linestyle=style, linewidth=1.4)
        image_axes.add_patch(circle)
    hide_axes(image_axes)
    figure_title(
        image_axes,
        "Influence of every pixel",
        f"circles contain 50 % ({reaches[0]:.0f} px) and 95 % ({reaches[1]:.0f} px, dashed)",
    )
    scale(shown, [image_axes], "relative to uniform influence", fraction=0.05, aspect=30)
    y, x = (np.arange(n) - c for n, c in zip(field.influence.shape, field.center, strict=True))
    ring = np.hypot(y[:, None], x[None]).round().astype(int)
    counts = np.bincount(ring.ravel())
    for values, words, colour in (
        (field.influence, "model", BLUE),
        (np.full_like(field.influence, 1 / field.influence.size), "uniform", GREY),
    ):
        within = np.cumsum(np.bincount(ring.ravel(), values.ravel(), len(counts)))
        curve.plot(np.arange(len(counts)), within, color=colour, label=words, linewidth=2)
    curve.set_xlabel("distance from the central patch in pixels", size=10, color=INK)
    curve.set_ylim(0, 1.02)
    finish_axes(
        curve, "Influence within a distance", f"{len(field.own)} image{'s' * (len(field.own) > 1)}", low=-0.12
    )
    return figure
