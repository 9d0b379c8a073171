"""What the pictures of the probe share: names of targets, and axes of R²."""

from typing import TYPE_CHECKING

from vispe.report.style import INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WORDS = {
    "lr+ud": "column and row",
    "lr": "column",
    "ud": "row",
    "diag": "diagonal",
    "radial": "distance to the centre",
    "raster": "reading order",
}


def r2_axis(ax: "Axes", which: str) -> None:
    """Let an axis of R² start at -1 at the lowest, and say so where it does."""
    low = min(-0.25, ax.dataLim.y0 if which == "y" else ax.dataLim.x0)
    ends, scale = (max(low - 0.05, -1.05), 1.03), (ax.set_yticks if which == "y" else ax.set_xticks)
    ax.set(**{f"{which}lim": ends})
    ticks = [t for t in (-1, -0.5, 0, 0.5, 1) if t >= ends[0]]
    scale(ticks, ["≤ -1" if t == -1 else f"{t:g}" for t in ticks])
    if which == "y":
        ax.set_ylabel("held-out R²", color=INK)
    clean(ax)


def clean(ax: "Axes") -> None:
    """Take away frame and tick marks."""
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0, labelsize=9.5, colors=INK)
