"""Figure of a positional probe: true and predicted ramps, scores with controls, and the best channels.

matplotlib is imported on first use.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from vispe.errors import counted
from vispe.evaluate.probe.figures.r2_axes import r2_dots
from vispe.evaluate.probe.positional import ProbeResult
from vispe.utils.report.figure_style import BLUE, GREY, INK, ORANGE, clean_axes, new_figure
from vispe.utils.report.table import capitalize

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WORDS = {"lr": "Left to right", "ud": "Top to bottom", "diag": "Diagonal", "radial": "Centre to border"}


def plot_probe(result: ProbeResult, title: str = "") -> "Figure":
    """Plot the true and predicted ramp, the scores of all targets, and the best channels.

    Args:
        result: return value of `positional_probe`.
        title: such as the name of the model.

    Returns:
        The figure; save it with `figure.savefig(path)`.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    truth, predicted, mask = (result.example[key] for key in ("ramp", "prediction", "mask"))
    n = truth.shape[2]
    figure = new_figure(12, 2.7 + 2.9 * max(n, 2))
    figure.set_layout_engine(None)
    inch = 1 / figure.get_figheight()
    colour = {"position": ORANGE, "no": BLUE}.get(result.verdict.split()[0], GREY)
    figure.text(0.04, 1 - 0.42 * inch, f"Positional probe: {title}" if title else "Positional probe", size=13)
    figure.text(0.04, 1 - 0.82 * inch, capitalize(result.verdict), size=17, weight="bold", color=colour)
    figure.text(0.04, 1 - 1.10 * inch, "  ".join(result.notes), size=10, color=INK)
    figure.text(0.04, 0.22 * inch, _footnote(result), size=9, color=GREY, linespacing=1.5)
    box = {"top": 1 - 1.55 * inch, "bottom": 1.35 * inch}
    shape = (n, 2) if n > 1 else (2, 1)
    maps = figure.add_gridspec(*shape, left=0.04, right=0.55, wspace=0.08, hspace=0.22, **box)
    parts = result.rows[0].target.split("+") if n > 1 else [result.rows[0].target]
    for k, part in enumerate(parts):
        name = _WORDS.get(part, part)
        left, right = (figure.add_subplot(maps[2 * k + j]) for j in (0, 1))
        _draw_map(left, truth[..., k], f"{name}: true")
        rows, cols = np.nonzero(mask)
        left.scatter(cols, rows, s=14, color="white", edgecolor=INK, linewidth=0.7)
        image = _draw_map(right, predicted[..., k], f"{name}: predicted from the features")
        bar = figure.colorbar(image, ax=[left, right], fraction=0.025, pad=0.02, ticks=(0, 0.5, 1))
        bar.outline.set_visible(False)
        bar.ax.tick_params(length=0, labelsize=9, colors=INK)
    bars = figure.add_gridspec(2, 1, left=0.665, right=0.925, hspace=0.36, **box)
    _draw_scores(figure.add_subplot(bars[0]), result)
    _draw_channels(figure.add_subplot(bars[1]), result)
    return figure


def _draw_map(ax: "Axes", values: np.ndarray, title: str) -> Any:
    image = ax.imshow(values, cmap="viridis", vmin=0, vmax=1, interpolation="nearest")
    ax.set_title(title, size=10.5, color=INK, loc="left")
    ax.set_anchor("W")
    ax.set_xticks([])
    ax.set_yticks([])
    ax.spines[:].set_visible(False)
    return image


def _draw_scores(ax: "Axes", result: ProbeResult) -> None:
    """Plot one dot per image and mask, and a bar for the median, clipped at -1."""
    rows = result.rows[::-1]
    for y, row in enumerate(rows):
        values = row.r2_heldout.ravel()
        values = values[np.isfinite(values)]
        if not len(values):
            ax.text(0, y, " constant on this grid", va="center", size=9, color=GREY)
            continue
        colour = GREY if row.target == "random" else BLUE
        ax.barh(y, max(float(np.median(values)), -1), height=0.62, color=colour, alpha=0.35, linewidth=0)
        r2_dots(ax, y, values, colour, None if row.target == "random" else row.shuffled, size=9)
    ax.axvline(0, color=INK, linewidth=0.8)
    least = [np.nanmin(v, initial=0) for row in rows for v in (row.r2_heldout, np.median(row.shuffled))]
    low = min(-0.25, *(max(value, -1) - 0.05 for value in least))
    ax.set_xlim(low, 1.0)
    if min(least) < -1:
        ax.set_xticks((-1, -0.5, 0, 0.5, 1), ("≤ -1", "-0.5", "0", "0.5", "1"))
    ax.set_yticks(range(len(rows)), [row.target for row in rows])
    ax.set_title("Held-out R² by target, with the median", size=10.5, loc="left")
    clean_axes(ax)


def _draw_channels(ax: "Axes", result: ProbeResult, n: int = 12) -> None:
    """Plot bars of the channels with the highest R² for the headline target."""
    channels = result.top_channels(n)
    values = np.nan_to_num(result.channel_r2[channels])
    ax.bar(range(len(channels)), np.maximum(values, -0.25), color=BLUE, alpha=0.8, width=0.7)
    ax.axhline(0, color=INK, linewidth=0.8)
    ax.set_ylim(min(-0.1, max(values.min(), -0.25) * 1.1), max(0.3, values.max() * 1.15))
    ax.set_xticks(range(len(channels)), [str(c) for c in channels])
    ax.set_xlabel("channel", color=INK)
    ax.set_ylabel("held-out R²", color=INK)
    total = len(result.channel_r2)
    title = f"{result.rows[0].target} from one channel: best {len(channels)} of {total}"
    ax.set_title(title, size=10.5, loc="left")
    clean_axes(ax)
    ax.tick_params(axis="x", labelsize=7.5)


def _footnote(result: ProbeResult) -> str:
    h, w = result.grid
    settings = result.settings
    fit = f"ridge, alpha {settings['alpha']:g}" if settings["regressor"] == "ridge" else "least squares"
    return (
        f"Maps: first image and mask. White dots: the {result.n_samples} of {h}x{w} patches used for training ({fit}, "
        f"{counted(len(result.channel_r2), 'channel')}).\nScores: held-out patches; one dot per image and mask "
        f"({counted(result.n_images, 'image')}, {counted(settings['masks_per_image'], 'mask')} each). 1 = position "
        "is known, 0 or less = unknown.\nControls, which must not be predictable: random = noise; diamonds = the "
        "same target with shuffled patches (median)."
    )
