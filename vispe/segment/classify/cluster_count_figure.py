"""Figure of the choice of the number of clusters."""

import numpy as np

from vispe.errors import counted
from vispe.segment.classify.cluster_count import Choice

NAME = "clusters.png"
"""File name of the figure in the results folder."""


def plot_choice(choice: Choice) -> np.ndarray:
    """Plot the silhouette by K and the grey-level histogram with its peaks; return (h, w, 3) uint8."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3), dpi=100, facecolor="white", layout="constrained")
    canvas = FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    left.plot(list(choice.silhouette), list(choice.silhouette.values()), "o-", color="#0072B2")
    left.axvline(choice.n_classes, color="#D55E00", linewidth=1)
    left.set(xlabel="clusters K", title="mean silhouette", xticks=list(choice.silhouette))
    right.plot(choice.levels, choice.density, color="#0072B2")
    for level in choice.peaks:
        right.axvline(level, color="#D55E00", linewidth=1)
    right.set(
        xlabel="grey level",
        title=f"grey levels: {counted(len(choice.peaks), 'peak')}",
        yticks=[],
        xlim=(0, 1),
    )
    figure.suptitle(f"K = {choice.n_classes} by {choice.by}")
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()
