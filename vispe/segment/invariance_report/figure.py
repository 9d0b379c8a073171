"""The trust report as one picture: the classes, where poses disagree, and the fractions pose by pose."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vispe.report import figure_style
from vispe.report.figure_style import GREY, INK
from vispe.segment.invariance_report.result import MILD
from vispe.segment.overlays import PALETTE, Color, boundaries

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from vispe.segment.invariance_report.result import Trust

_WIDTH = 11.0  # inches
_LARGEST = 1200  # pixels along a side of what is drawn
_MARKS = "osD^vPX*<>"
_SOFT = "#5D6771"
_WORDS = {"angles": "turned by other angles"}


def plot_trust(
    trust: Trust, page: np.ndarray, colors: Sequence[Color] | None = None, title: str = ""
) -> Figure:
    """Draw a trust report.

    Args:
        trust: the report.
        page: (h, w, c) float in [0, 1], the picture that it is of.
        colors: of the classes; default `PALETTE`.
        title: a line above all, such as the name of the picture.

    Returns:
        A figure that belongs to no window: the picture with its classes, the map of disagreement, and below the change
        of each fraction by pose with the floor as a grey band.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    colors = [PALETTE[k % len(PALETTE)] for k in range(len(trust.names))] if colors is None else colors
    h, w = trust.labels.shape
    tall = _WIDTH * 0.45 * float(np.clip(h / w, 0.3, 1.5)) + 0.6
    keys = -(-len(trust.names) // _columns(trust))
    figure = figure_style.new_figure(_WIDTH, tall + 4.2 + 0.22 * keys)
    grid = figure.add_gridspec(2, 2, height_ratios=[tall, 3.2])
    upper = [figure.add_subplot(grid[0, k]) for k in range(2)]
    lower = figure.add_subplot(grid[1, :])
    _classes(upper[0], trust, page, colors)
    _map(upper[1], trust, figure)
    _changes(lower, trust, colors)
    words = f"{title}\n" if title else ""
    figure.suptitle(
        words + _wrapped(trust.verdict, 118), x=0.008, ha="left", size=11.5, color=INK, parse_math=False
    )
    return figure


def rendered(figure: Figure) -> np.ndarray:
    """Return a figure as pixels (H, W, 3) uint8."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def _classes(ax: Axes, trust: Trust, page: np.ndarray, colors: Sequence[Color]) -> None:
    """The picture in grey under the colours of its classes."""
    every = _every(trust.labels)
    labels, grey = trust.labels[::every, ::every], page[::every, ::every].mean(-1)
    table = np.array([(255, 255, 255), *colors]) / 255
    shown = 0.6 * np.clip(np.nan_to_num(grey), 0, 1)[..., None] + 0.4 * table[labels]
    edge = boundaries(labels, 1 + max(labels.shape) // 700)
    shown[edge] = table[labels[edge]]
    shown[labels == 0] = 1
    ax.imshow(shown, interpolation="auto")
    figure_style.heading(ax, "The picture and its classes", "as it stands")
    _bare(ax)


def _map(ax: Axes, trust: Trust, figure: Figure) -> None:
    """Where the poses disagree."""
    every = _every(trust.labels)
    poses = 1 + sum(p.family != "angles" for p in trust.poses)
    shown = trust.disagreement
    for axis, length in enumerate(shown.shape):
        # thin lines stay, and so does no data
        shown = np.fmax.reduceat(shown, np.arange(0, length, every), axis)
    image = ax.imshow(shown, cmap="Oranges", vmin=0, vmax=0.5, interpolation="auto")
    ax.set_facecolor("#C9D0D6")
    under = f"share of the {poses} poses that give another class than most"
    figure_style.heading(ax, "Where the poses disagree", under)
    bar = figure.colorbar(image, ax=ax, location="right", fraction=0.045, pad=0.02, shrink=0.9,
                          extend="max" if len(trust.names) > 2 else "neither")  # fmt: skip
    bar.outline.set_visible(False)
    bar.set_ticks([0, 0.25, 0.5], labels=["0", "25 %", "50 %"])
    bar.ax.tick_params(length=0, labelsize=9, colors=INK)
    _bare(ax)


def _changes(ax: Axes, trust: Trust, colors: Sequence[Color]) -> None:
    """The change of each fraction at each pose, with the floor of its family as a band."""
    families = trust.families
    ticks, labels, start, tops = [], [], 0, [0.0]
    few = min(max(4 / max(len(trust.names), 1), 0.3), 1)
    for family in families:
        poses = [p for p in trust.poses if p.family == family]
        ends = (start - 0.5, start + len(poses) - 0.5)
        floor = float(trust.floor(family).max())
        ax.fill_between(ends, -floor, floor, color="#DDE1E4", linewidth=0, zorder=0)
        ax.hlines([-floor, floor], *ends, color=GREY, linewidth=0.8, zorder=0)
        changes = np.array([p.change for p in poses])
        aside = np.linspace(-0.28, 0.28, len(trust.names)) * (len(trust.names) > 1)
        for k in range(len(trust.names)):
            x = start + np.arange(len(poses)) + aside[k]
            ax.plot(x, changes[:, k], _MARKS[k % len(_MARKS)], markersize=4 + 4 * few, color=np.array(colors[k]) / 255,
                    markeredgecolor="white", markeredgewidth=0.6, zorder=3, clip_on=False)  # fmt: skip
        words = _WORDS.get(family, family)
        ax.text(np.mean(ends), 0.985, words, transform=ax.get_xaxis_transform(), size=10, ha="center", va="top",
                color=_SOFT)  # fmt: skip
        ax.axvline(ends[1], color=figure_style.FAINT, linewidth=0.8, zorder=0)
        ticks += range(start, start + len(poses))
        labels += [p.name.removeprefix("shift ").removesuffix(" px") for p in poses]
        tops += [floor, *np.abs(changes).ravel()]
        start += len(poses)
    reach = 1.2 * max(np.nanmax(tops), MILD / 2)  # what is steady looks it
    ax.set_ylim(-reach, reach)
    ax.set_xlim(-0.6, max(start, 1) - 0.4)
    ax.axhline(0, color=INK, linewidth=0.8, zorder=1)
    ax.set_xticks(ticks, labels)
    ax.set_ylabel("change, percentage points", color=INK, size=10)
    under = "from the picture as it stands; shifts in pixels (down, right); grey: what the measurement itself changes"
    figure_style.heading(ax, "Change of the area fractions of the map by pose", under)
    figure_style.clean(ax, "y")
    _key(ax, trust, colors)


def _key(ax: Axes, trust: Trust, colors: Sequence[Color]) -> None:
    """Names, fractions and signs of the classes below the axes."""
    from matplotlib.lines import Line2D

    look = {"linestyle": "", "markersize": 7}
    handles = [
        Line2D([], [], marker=_MARKS[k % len(_MARKS)], color=np.array(colors[k]) / 255, **look)
        for k in range(len(trust.names))
    ]
    found = ax.legend(handles, [str(k) for k in range(len(handles))], loc="upper center", bbox_to_anchor=(0.5, -0.1),
                      ncols=_columns(trust), frameon=False, fontsize=10, labelcolor=INK)  # fmt: skip
    for text, name, own in zip(found.get_texts(), trust.names, trust.fractions, strict=True):
        text.set_parse_math(False)
        text.set_text(key_words(name, own))


def key_words(name: str, fraction: float) -> str:
    """Return the entry of a class in the key: its name and its fraction of the map in per cent, NaN without data."""
    return f"{_shortened(name)} {fraction:.1f} % of the map" if np.isfinite(fraction) else _shortened(name)


def _columns(trust: Trust) -> int:
    """Classes side by side in the key."""
    longest = max(len(_shortened(name)) for name in trust.names) + 23
    return max(1, min(len(trust.names), 110 // longest))


def _shortened(name: str) -> str:
    return name if len(name) < 32 else f"{name[:20].rstrip()}…{name[-10:].lstrip()}"


def _every(labels: np.ndarray) -> int:
    return -(-max(labels.shape) // _LARGEST)


def _bare(ax: Axes) -> None:
    ax.set_xticks([])
    ax.set_yticks([])
    ax.spines[:].set_color(figure_style.FAINT)


def _wrapped(text: str, width: int) -> str:
    import textwrap

    return "\n".join(textwrap.wrap(text.replace(" %", "\u00a0%"), width))  # no line begins with a %
