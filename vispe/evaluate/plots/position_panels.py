"""Panels of the figure of positions: coordinates by token index, and tokens in 3D."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from vispe.evaluate.plots.plotted_scheme import PlottedScheme
from vispe.utils.report.figure_style import GREY, INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TINTS = {"image": "#E69F00", "video": "#56B4E9"}


def draw_coordinates(ax: Axes, drawn: PlottedScheme) -> None:
    """Plot all coordinates by token index; text tokens with equal coordinates in ink colour."""
    n = drawn.ids.shape[1]
    number = np.arange(n)
    for start, end, kind, _ in drawn.visuals:
        ax.axvspan(start - 0.5, end - 0.5, color=TINTS[kind], alpha=0.16, linewidth=0)
    for token in drawn.coupled:
        ax.axvspan(token - 0.5, token + 0.5, color=GREY, alpha=0.3, linewidth=0)
    for cut in drawn.cuts:
        ax.axvline(cut - 0.5, color="white", lw=0.9 * _smaller(n))
    _label_images(ax, drawn)
    are_equal = (drawn.ids == drawn.ids[:1]).all(0) & ~drawn.visual
    axes = len(drawn.ids)
    for a, (values, colour) in enumerate(zip(drawn.ids, drawn.colours, strict=True)):
        separate = ~are_equal if axes > 1 else drawn.visual
        group = a * 3 // axes if axes % 3 == 0 else a
        size = _smaller(n) * (3.2 if axes == 1 else 4.8 - 1.1 * min(group, 2))
        ax.plot(number[separate], values[separate], "o", ms=size, mew=0, color=colour)
    ax.plot(number[are_equal], drawn.ids[0, are_equal], "o", ms=3.2 * _smaller(n), mew=0, color=INK)
    for value, colour in zip(drawn.following, drawn.colours, strict=True):
        equal = (drawn.following == drawn.following[0]).all()
        ax.plot(n, value, "D", ms=6, mfc="white", mec=INK if equal else colour, mew=1.3, clip_on=False)
    if (drawn.following == drawn.following[0]).all():
        ax.annotate(f"next: {drawn.following[0]:.4g}", (n, drawn.following[0]), (6, 7), textcoords="offset points",
                    size=8.5, color=INK, ha="right", va="bottom")  # fmt: skip
    _label_axes(ax, drawn)
    ax.set_title(drawn.title, size=min(12, max(7, 390 / len(drawn.title))), color=INK, loc="left", pad=17)
    ax.set_xlim(-1, n + 0.5)
    ax.set_xlabel("token", color=INK, size=9, labelpad=1)
    ax.set_ylabel("coordinate", color=INK, size=9)
    ax.grid(axis="y", color="#E3E6E8", lw=0.8)
    ax.set_axisbelow(True)
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0, labelsize=8.5, colors=INK)


def _smaller(tokens: int) -> float:
    """Return the scale of markers for a number of tokens."""
    return min(1.0, max(0.28, (100 / tokens) ** 0.5))


def _label_images(ax: Axes, drawn: PlottedScheme) -> None:
    """Label images and videos above the axes, abbreviated or omitted if there is no space."""
    per_letter = 1.7 * drawn.ids.shape[1] / 100  # tokens
    free = -np.inf
    for start, end, _, words in drawn.visuals:
        middle = (start + end - 1) / 2
        for text in (words, words.partition(" ")[2]):
            half = per_letter * len(text) / 2
            if middle - half > free:
                ax.text(middle, 1.015, text, ha="center", va="bottom", size=8, color=INK,
                        transform=ax.get_xaxis_transform())  # fmt: skip
                free = middle + half + per_letter
                break


def _label_axes(ax: Axes, drawn: PlottedScheme) -> None:
    """Write the names of the coordinates in their colours into the empty upper left corner."""
    if len(drawn.names) == 1:
        return
    shown = dict.fromkeys(zip((n.rstrip(" 0123456789") for n in drawn.names), drawn.colours, strict=True))
    for k, (name, colour) in enumerate(shown):
        ax.annotate(name, (0, 1), (6, -6 - 11 * k), xycoords="axes fraction", textcoords="offset points",
                    size=9, weight="bold", color=colour, va="top")  # fmt: skip


def draw_space(ax: Any, drawn: PlottedScheme, limits: tuple[float, float]) -> None:
    """Plot the tokens in 3D with time upwards and text on the diagonal."""
    from matplotlib.ticker import MaxNLocator

    (time, row, column), names = drawn.in_space()
    ax.plot(*(3 * [limits]), color=GREY, lw=0.8, ls=(0, (1, 2)), zorder=0)
    text, small = np.append(~drawn.visual, False), _smaller(drawn.ids.shape[1])
    ax.plot(column[text], row[text], time[text], "o", ms=3.4 * small**0.5, mew=0, color=INK)
    for start, end, kind, _ in drawn.visuals:
        part = slice(start, end)
        edge = 0.4 if small == 1 else 0
        ax.scatter(
            column[part], row[part], time[part], s=17 * small, color=TINTS[kind], edgecolor="white", lw=edge
        )
    ax.plot(column[-1:], row[-1:], time[-1:], "D", ms=6, mfc="white", mec=INK, mew=1.3)
    ax.set(xlim=limits, ylim=limits, zlim=limits)
    ax.view_init(elev=20, azim=-40)
    ax.set_box_aspect((1, 1, 1), zoom=0.97)
    for axis, name in zip((ax.xaxis, ax.yaxis, ax.zaxis), names[::-1], strict=True):
        axis.set_major_locator(MaxNLocator(4, integer=True, steps=[1, 2, 5, 10]))
        axis.set_pane_color((0.96, 0.97, 0.975, 1.0))
        axis._axinfo["grid"].update(color="#FFFFFF", linewidth=0.9)
        axis.line.set_color(GREY)
        axis.set_tick_params(labelsize=7.5, pad=-2, colors=INK)
        axis.set_label_text(name, size=8.5, color=INK)
        axis.labelpad = -6
    ax.zaxis.labelpad = -2
