"""Figure of the trust report: the classes, the disagreement of poses, and the fractions by pose."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vispe.errors import counted
from vispe.segment.invariance_report.result import MILD
from vispe.segment.invariance_report.verdict_text import MOVES
from vispe.segment.overlays import PALETTE, Color, boundaries
from vispe.utils.report import figure_style
from vispe.utils.report.figure_style import GREY, INK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from vispe.segment.invariance_report.result import InvarianceReport

_WIDTH = 11.0  # inches
_LARGEST = 1200  # largest side of a map in pixels
_MARKS = "osD^vPX*<>"
_SOFT = "#5D6771"


def plot_trust(
    trust: InvarianceReport, page: np.ndarray, colors: Sequence[Color] | None = None, title: str = ""
) -> Figure:
    """Plot a trust report.

    Args:
        trust: the report.
        page: (h, w, c) float in [0, 1], its image.
        colors: colours of the classes; default `PALETTE`.
        title: a headline, such as the name of the image.

    Returns:
        A figure without a window: the image with its classes, the map of disagreement, and below the change
        of each fraction by pose with the noise floor as a grey band.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    colors = [PALETTE[k % len(PALETTE)] for k in range(len(trust.names))] if colors is None else colors
    h, w = trust.labels.shape
    map_height = _WIDTH * 0.45 * float(np.clip(h / w, 0.3, 1.5)) + 0.6
    legend_rows = -(-len(trust.names) // _columns(trust))
    figure = figure_style.new_figure(_WIDTH, map_height + 4.2 + 0.22 * legend_rows)
    grid = figure.add_gridspec(2, 2, height_ratios=[map_height, 3.2])
    upper = [figure.add_subplot(grid[0, k]) for k in range(2)]
    lower = figure.add_subplot(grid[1, :])
    _classes(upper[0], trust, page, colors)
    _map(upper[1], trust, figure)
    _changes(lower, trust, colors)
    headline = (f"{title}\n" if title else "") + _wrapped(trust.verdict, 118)
    # the layout reserves too little height for a title of several lines
    below = 1 - 0.21 * (headline.count("\n") + 2.5) / figure.get_figheight()
    figure.get_layout_engine().set(rect=(0, 0, 1, below))
    look = {"size": 11.5, "color": INK, "parse_math": False}
    figure.text(0.008, 0.992, headline, ha="left", va="top", **look)
    return figure


def rendered(figure: Figure) -> np.ndarray:
    """Return a figure as pixels (H, W, 3) uint8."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def _classes(ax: Axes, trust: InvarianceReport, page: np.ndarray, colors: Sequence[Color]) -> None:
    """Show the image in grey, tinted by its classes."""
    stride = _stride(trust.labels)
    labels, grey = trust.labels[::stride, ::stride], page[::stride, ::stride].mean(-1)
    table = np.array([(255, 255, 255), *colors]) / 255
    blended = 0.6 * np.clip(np.nan_to_num(grey), 0, 1)[..., None] + 0.4 * table[labels]
    edge = boundaries(labels, 1 + max(labels.shape) // 700)
    blended[edge] = table[labels[edge]]
    blended[labels == 0] = 1
    ax.imshow(blended, interpolation="auto")
    figure_style.figure_title(ax, "Image and classes", "without a pose")
    _bare(ax)


def _map(ax: Axes, trust: InvarianceReport, figure: Figure) -> None:
    stride = _stride(trust.labels)
    poses = 1 + sum(p.family != "angles" for p in trust.poses)
    disagreement = trust.disagreement
    for axis, length in enumerate(disagreement.shape):
        # block maximum: preserves thin lines, and no data
        disagreement = np.fmax.reduceat(disagreement, np.arange(0, length, stride), axis)
    image = ax.imshow(disagreement, cmap="Oranges", vmin=0, vmax=0.5, interpolation="auto")
    ax.set_facecolor("#C9D0D6")
    subtitle = f"fraction of the {counted(poses, 'pose')} that predict another class than the majority"
    figure_style.figure_title(ax, "Disagreement of poses", subtitle)
    bar = figure.colorbar(image, ax=ax, location="right", fraction=0.045, pad=0.02, shrink=0.9,
                          extend="max" if len(trust.names) > 2 else "neither")  # fmt: skip
    bar.outline.set_visible(False)
    bar.set_ticks([0, 0.25, 0.5], labels=["0", "25 %", "50 %"])
    bar.ax.tick_params(length=0, labelsize=9, colors=INK)
    _bare(ax)


def _changes(ax: Axes, trust: InvarianceReport, colors: Sequence[Color]) -> None:
    """Plot the change of each fraction by pose, with the noise floor of each family as a band."""
    families = trust.families
    ticks, labels, start, tops = [], [], 0, [0.0]
    scale = min(max(4 / max(len(trust.names), 1), 0.3), 1)
    for family in families:
        poses = [p for p in trust.poses if p.family == family]
        extent = (start - 0.5, start + len(poses) - 0.5)
        floor = float(trust.floor(family).max())
        ax.fill_between(extent, -floor, floor, color="#DDE1E4", linewidth=0, zorder=0)
        ax.hlines([-floor, floor], *extent, color=GREY, linewidth=0.8, zorder=0)
        changes = np.array([p.change for p in poses])
        offsets = np.linspace(-0.28, 0.28, len(trust.names)) * (len(trust.names) > 1)
        for k in range(len(trust.names)):
            x = start + np.arange(len(poses)) + offsets[k]
            ax.plot(x, changes[:, k], _MARKS[k % len(_MARKS)], markersize=4 + 4 * scale,
                    color=np.array(colors[k]) / 255, markeredgecolor="white", markeredgewidth=0.6, zorder=3,
                    clip_on=False)  # fmt: skip
        caption = MOVES.get(family, family)
        ax.text(np.mean(extent), 0.985, caption, transform=ax.get_xaxis_transform(), size=10, ha="center", va="top",
                color=_SOFT)  # fmt: skip
        ax.axvline(extent[1], color=figure_style.FAINT, linewidth=0.8, zorder=0)
        ticks += range(start, start + len(poses))
        labels += [p.name.removeprefix("shift ").removesuffix(" px") for p in poses]
        tops += [floor, *np.abs(changes).ravel()]
        start += len(poses)
    reach = 1.2 * max(np.nanmax(tops), MILD / 2)  # lower bound, so that negligible changes look small
    ax.set_ylim(-reach, reach)
    ax.set_xlim(-0.6, max(start, 1) - 0.4)
    ax.axhline(0, color=INK, linewidth=0.8, zorder=1)
    ax.set_xticks(ticks, labels)
    ax.set_ylabel("change, percentage points", color=INK, size=10)
    subtitle = (
        "from the unmodified image; shifts in pixels (down, right); grey: noise floor of the measurement"
    )
    figure_style.figure_title(ax, "Change of the area fractions of the map by pose", subtitle)
    figure_style.clean_axes(ax, "y")
    _key(ax, trust, colors)


def _key(ax: Axes, trust: InvarianceReport, colors: Sequence[Color]) -> None:
    """Add names, fractions and markers of the classes below the axes."""
    from matplotlib.lines import Line2D

    style = {"linestyle": "", "markersize": 7}
    handles = [
        Line2D([], [], marker=_MARKS[k % len(_MARKS)], color=np.array(colors[k]) / 255, **style)
        for k in range(len(trust.names))
    ]
    legend = ax.legend(handles, [str(k) for k in range(len(handles))], loc="upper center", bbox_to_anchor=(0.5, -0.1),
                      ncols=_columns(trust), frameon=False, fontsize=10, labelcolor=INK)  # fmt: skip
    for text, name, fraction in zip(legend.get_texts(), trust.names, trust.fractions, strict=True):
        text.set_parse_math(False)
        text.set_text(legend_text(name, fraction))


def legend_text(name: str, fraction: float) -> str:
    """Return the legend entry of a class: its name and its fraction of the map in percent, unless NaN."""
    return f"{_shortened(name)} {fraction:.1f} % of the map" if np.isfinite(fraction) else _shortened(name)


def _columns(trust: InvarianceReport) -> int:
    longest = max(len(_shortened(name)) for name in trust.names) + 23
    return max(1, min(len(trust.names), 110 // longest))


def _shortened(name: str) -> str:
    return name if len(name) < 32 else f"{name[:20].rstrip()}…{name[-10:].lstrip()}"


def _stride(labels: np.ndarray) -> int:
    return -(-max(labels.shape) // _LARGEST)


def _bare(ax: Axes) -> None:
    ax.set_xticks([])
    ax.set_yticks([])
    ax.spines[:].set_color(figure_style.FAINT)


def _wrapped(text: str, width: int) -> str:
    import textwrap

    # non-breaking space: no line starts with a %
    return "\n".join(textwrap.wrap(text.replace(" %", "\u00a0%"), width))
