"""Figures of position by block and by channel.

matplotlib is imported on first use.
"""

from typing import TYPE_CHECKING

import numpy as np

from vispe.evaluate.probe.figures.r2_axes import WORDS, r2_axis
from vispe.evaluate.probe.layer_probe import LayerProbe
from vispe.utils.report.figure_style import BLUE, GREY, INK, ORANGE, clean_axes, new_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STYLES = {  # colours of Okabe and Ito, and markers to distinguish lines in greyscale
    "lr+ud": (INK, "o"),
    "lr": (BLUE, ">"),
    "ud": ("#56B4E9", "v"),
    "diag": ("#009E73", "X"),
    "radial": (ORANGE, "s"),
    "raster": ("#CC79A7", "P"),
}
_LEGEND = {
    "loc": "center left",
    "bbox_to_anchor": (1.0, 0.5),
    "frameon": False,
    "fontsize": 9,
    "labelcolor": INK,
}


def plot_probe_layers(result: LayerProbe, ax: "Axes | None" = None) -> "Axes":
    """Plot held-out R² after every block, median over images; the first point is the pixels of the patches.

    The band is the interquartile range over images of the headline target. Values are clipped at -1.

    Args:
        result: return value of `probe_layers`.
        ax: axes; a new figure by default.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    ax = new_axes(ax, (7.6, 4.2))
    blocks, low = np.arange(len(result.r2)), -1.0
    for k, name in reversed(list(enumerate(result.targets))):
        colour, marker = _STYLES[name]
        lead = k == 0
        style = {"color": colour, "marker": marker, "markersize": 6 if lead else 4.5, "zorder": 3 + lead}
        middle = np.maximum(np.median(result.r2[:, k], axis=1), low)
        ax.plot(blocks, middle, linewidth=2.4 if lead else 1.2, label=WORDS[name], **style)
        if result.pixels is not None:
            ax.plot(-1, max(float(np.median(result.pixels[k])), low), linestyle="none", **style)
    if result.r2.shape[2] > 1:
        band = np.percentile(result.r2[:, 0], [25, 75], axis=1)
        ax.fill_between(blocks, *np.maximum(band, low), color=INK, alpha=0.12, linewidth=0)
    control = np.maximum(np.median(result.shuffled[:, 0], axis=1), low)
    ax.plot(blocks, control, color=GREY, linestyle="--", linewidth=1.4, label="shuffled (control)")
    ax.axhline(0, color=INK, linewidth=0.8)
    ticks = np.unique(np.linspace(0, len(blocks) - 1, min(len(blocks), 13)).astype(int))
    names = [str(k) for k in ticks]
    if result.pixels is not None:
        ticks, names = np.array([-1, *ticks]), ["pixels", *names]
        ax.axvline(-0.5, color=GREY, linewidth=0.8, linestyle=":")
    ax.set_xticks(ticks, names)
    ax.set_xlabel("after block", color=INK)
    r2_axis(ax, "y")
    handles, labels = ax.get_legend_handles_labels()
    # targets from the headline on, the control last
    order = [*range(len(labels) - 2, -1, -1), len(labels) - 1]
    ax.legend([handles[i] for i in order], [labels[i] for i in order], **_LEGEND)
    ax.set_title("Position by block", size=10.5, loc="left", color=INK)
    return ax


def plot_probe_channels(result: LayerProbe, block: int = -1, ax: "Axes | None" = None, n: int = 6) -> "Axes":
    """Plot the held-out R² of every channel of a block, for its best target.

    Args:
        result: return value of `probe_layers`.
        block: index of the block; negative counts from the end.
        ax: axes; a new figure by default.
        n: number of labelled channels, those with the highest R² above 0.05.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    ax = new_axes(ax, (7.6, 3.6))
    single = [k for k, name in enumerate(result.targets) if name not in ("lr+ud", "raster")] or [0]
    curves = np.nan_to_num(result.channel_r2[block][single], nan=-1.0)
    best, which = curves.max(0), curves.argmax(0)
    floor = -0.1
    for j, k in enumerate(single):
        name = result.targets[k]
        colour, marker = _STYLES[name]
        channels = np.flatnonzero(which == j)
        heights = np.maximum(best[channels], floor)
        ax.vlines(channels, 0, heights, color=colour, linewidth=1.1)
        shown = heights > 0.05
        style = {"color": colour, "marker": marker, "markersize": 5, "linestyle": "none"}
        ax.plot(channels[shown], heights[shown], label=WORDS[name], **style)
    ax.axhline(0, color=INK, linewidth=0.8)
    ax.set_xlim(-0.02 * len(best), 1.02 * len(best))
    top = max(0.3, float(best.max()) * 1.18)
    ax.set_ylim(floor * 1.15, top)
    _label_peaks(ax, best, n, top - floor)
    number = block % len(result.channel_r2)
    ax.set_title(f"Position by channel, after block {number}", size=10.5, loc="left", color=INK)
    ax.set_xlabel("channel", color=INK)
    ax.set_ylabel("held-out R²", color=INK)
    ticks = [t for t in ax.get_yticks() if 0 <= t <= 1]
    ax.set_yticks([floor, *ticks], [f"≤ {floor:g}", *(f"{t:g}" for t in ticks)])
    ax.legend(**_LEGEND)
    clean_axes(ax)
    return ax


def _label_peaks(ax: "Axes", best: np.ndarray, n: int, span: float) -> None:
    """Label the highest channels, adjacent ones together."""
    peaks = sorted(int(c) for c in np.argsort(-best, kind="stable")[:n] if best[c] > 0.05)
    groups: list[list[int]] = []
    for c in peaks:
        if groups and c - groups[-1][-1] < 0.04 * len(best):
            groups[-1].append(c)
        else:
            groups.append([c])
    for group in groups:
        words, height = _numbers(group), max(best[group]) + 0.03 * span
        ax.text(float(np.mean(group)), height, words, ha="center", va="bottom", size=9, color=INK)


def _numbers(group: list[int]) -> str:
    """Return '54-57' for runs of three or more consecutive numbers, otherwise '54, 57'."""
    consecutive = len(group) > 2 and group[-1] - group[0] == len(group) - 1
    return f"{group[0]}-{group[-1]}" if consecutive else ", ".join(map(str, group))
