"""Figure and HTML report of attention heads; matplotlib is imported on first use."""

from typing import TYPE_CHECKING

import numpy as np

from vispe.errors import counted
from vispe.evaluate.attention.head_health import PATTERNS, HeadHealth
from vispe.utils.report.figure_style import BLUE, GREY, INK, ORANGE, clean_axes, new_figure
from vispe.utils.report.html_page import Page
from vispe.utils.report.result import Drawing, Note, Rows, Section, report_page
from vispe.utils.report.table import capitalize

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"distributed": "#9AA5B1", "local": BLUE, "sink": "#E69F00", "dead": ORANGE}
_LETTERS = {"class": "C", "distillation": "D", "register": "R", "prefix": "T", "patch": "P"}
_PANELS = 12  # max number of layers with a panel of profiles


def plot_health(result: HeadHealth, title: str = "") -> "Figure":
    """Plot the classes and sinks of all heads, their reach, and their attention by distance.

    Args:
        result: return value of `head_health`.
        title: such as the name of the model.

    Returns:
        The figure; save it with `figure.savefig(path)`.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    layers, heads = result.pattern.shape
    high = 5.2 + 0.26 * max(heads, 6)
    figure = new_figure(14, high)
    figure.set_layout_engine(None)
    inch = 1 / high
    colour = ORANGE if result.collapsed > 0 else BLUE
    figure.text(0.04, 1 - 0.42 * inch, f"Attention heads: {title}" if title else "Attention heads", size=13)
    figure.text(0.04, 1 - 0.82 * inch, capitalize(result.verdict), size=16, weight="bold", color=colour)
    figure.text(0.04, 1 - 1.10 * inch, "  ".join(result.notes), size=10, color=INK)
    figure.text(0.04, 0.22 * inch, _footnote(result), size=9, color=GREY, linespacing=1.5)
    box = {"top": 1 - (1.55 + 0.2 * bool(result.notes)) * inch, "bottom": 1.35 * inch}
    left = figure.add_gridspec(2, 1, left=0.055, right=0.50, hspace=0.22, height_ratios=(heads + 3, 8), **box)
    top = figure.add_subplot(left[0])
    plot_head_map(result, top)
    plot_reach(result, figure.add_subplot(left[1], sharex=top))
    shown = np.unique(np.linspace(0, layers - 1, min(layers, _PANELS)).round().astype(int))
    columns = min(3, len(shown))
    rows = -(-len(shown) // columns)
    right = figure.add_gridspec(rows, columns, left=0.575, right=0.975, hspace=0.42, wspace=0.12, **box)
    first = None
    for k, layer in enumerate(shown):
        ax = figure.add_subplot(right[k // columns, k % columns], sharex=first, sharey=first)
        first = first or ax
        plot_profile(result, int(layer), ax)
        ax.tick_params(labelleft=k % columns == 0, labelbottom=k + columns >= len(shown))
    far = result.uniform_profile > 0
    times = result.profile[shown][..., far] / result.uniform_profile[far]
    if first is not None:
        # at least 1/12 to 12 times, so that small differences are not magnified
        low, high = float(times.min()) / 1.3, 1.3 * float(times.max())
        first.set_ylim(max(4e-3, min(1 / 12, low)), min(250.0, max(12.0, high)))
    label = "Attention to a patch by distance, relative to uniform attention"
    figure.text(0.575, box["top"] + 0.30 * inch, label, size=11.5, color=INK)
    below = box["bottom"] - 0.42 * inch
    figure.text(0.775, below, "distance from the query, patches", size=9.5, color=INK, ha="center")
    return figure


def health_page(result: HeadHealth, title: str, figure: "Figure") -> Page:
    """Return the HTML report: verdict, explanation, figure, tables of layers and of sinks.

    Args:
        result: return value of `head_health`.
        title: such as the name of the model.
        figure: return value of `plot_health`.
    """
    intro = (
        "A head that puts most of its attention on one token adds nearly the same vector everywhere. On a class or "
        "register token this is common and harmless; on a patch, or in most heads of a layer, inspect it."
    )
    columns = (
        "Heads per class; means over the heads of a layer. Entropy: 1 is uniform. Position: fraction of the variance "
        "of the logits explained by the offset. Reach: distance in patches that contains 95 % of the attention."
    )
    caption = f"Classes of heads, their reach, and their profiles: {result.verdict}."
    sections = [
        Section("", intro, *result.notes, Drawing(figure, caption)),
        Section("Layers", Note(columns), Rows(result.table())),
        _collapsed(result),
    ]
    return report_page(title, "Attention heads", f"{result.verdict}.", result.tone, sections)


def _collapsed(result: HeadHealth) -> Section | None:
    rows = [["layer", "head", "class", "onto", "of its attention", "same token in"]]
    for head in sorted(result.heads("sink", "dead"), key=lambda head: -result.sink_mass[head]):
        kind, token = PATTERNS[result.pattern[head]], result.tokens[result.sink_token[head]]
        mass, agreement = (f"{100 * v[head]:.0f} %" for v in (result.sink_mass, result.sink_agreement))
        rows.append([*map(str, head), kind, token, mass, f"{agreement} of images"])
    folded = "" if len(rows) <= 25 else f"all {len(rows) - 1} heads"
    return Section("Collapsed heads", Rows(rows, (2, 3), folded=folded)) if len(rows) > 1 else None


def plot_head_map(result: HeadHealth, ax: "Axes") -> "Axes":
    """Plot layers x heads, coloured by class, with the attention on the sink in percent and the letter of its token."""
    from matplotlib.patches import FancyBboxPatch

    layers, heads = result.pattern.shape
    for i, j in np.ndindex(layers, heads):
        name = _class(result, i, j)
        strong = name in ("sink", "dead")
        tile = FancyBboxPatch(
            (i - 0.42, j - 0.40), 0.84, 0.80, boxstyle="round,pad=0,rounding_size=0.12", mutation_aspect=1,
            facecolor=COLOURS[name], alpha=0.30 if name == "distributed" else 0.92, linewidth=0,
        )  # fmt: skip
        ax.add_patch(tile)
        letter = _LETTERS[result.sink_kind(i, j)] if strong else ""
        ax.text(
            i, j, f"{letter}{100 * float(result.sink_mass[i, j]):.0f}" if layers <= 16 else letter,
            ha="center", va="center", size=8 if layers <= 12 else 7,
            color="white" if name in ("local", "dead") else INK, weight="bold" if strong else "normal",
        )  # fmt: skip
    ax.set_xlim(-0.6, layers - 0.4)
    ax.set_ylim(heads - 0.4, -0.6)
    ax.set_xticks(range(layers))
    ax.set_yticks(range(heads))
    ax.set_ylabel("head", color=INK)
    ax.tick_params(labelbottom=False)
    _clean(ax)
    x = 0.0
    for name, colour in COLOURS.items():
        label = f"■ {len(result.heads(name))} {name}"
        ax.annotate(
            label, (0, 1), (x, 9), xycoords="axes fraction", textcoords="offset points",
            color=colour if name != "distributed" else "#6B7683", size=10.5, weight="bold",
        )  # fmt: skip
        x += 7.4 * len(label) + 10
    return ax


def plot_reach(result: HeadHealth, ax: "Axes") -> "Axes":
    """Plot the distance that contains 95 % of the attention between patches, per head, and that of the bias alone."""
    layers, heads = result.pattern.shape
    spread = np.linspace(-0.24, 0.24, heads) if heads > 1 else np.zeros(1)
    far = _reach_of(result.uniform_profile)
    ax.axhline(far, color=GREY, linewidth=0.9, linestyle=(0, (4, 3)))
    ax.annotate("uniform", (1, far), (4, 0), xycoords=("axes fraction", "data"), textcoords="offset points",
                size=8, color=GREY, va="center")  # fmt: skip
    for i in range(layers):
        colours = [COLOURS[_class(result, i, j)] for j in range(heads)]
        ax.hlines(result.bias_reach[1, i], i + spread - 0.05, i + spread + 0.05, color=INK, linewidth=1.1)
        ax.scatter(i + spread, result.reach[1, i], s=16, c=colours, linewidth=0, zorder=3)
    top = np.nanmax([far, result.reach[1].max(), *result.bias_reach[1][~np.isnan(result.bias_reach[1])]])
    ax.set_ylim(0, 1.12 * top)
    ax.set_ylabel("patches", color=INK)
    ax.set_xlabel("layer", color=INK)
    bias = "; bars: the bias alone" if np.isfinite(result.bias_reach[1]).any() else ""
    label = f"Distance that contains 95 % of a head's attention between patches{bias}"
    ax.set_title(label, size=10.5, loc="left")
    _clean(ax)
    ax.spines["bottom"].set_visible(True)
    ax.spines["bottom"].set_color("#D5DADF")
    return ax


def plot_profile(result: HeadHealth, layer: int, ax: "Axes") -> "Axes":
    """Plot attention by distance for the heads of a layer, relative to uniform attention (log scale)."""
    from matplotlib.ticker import NullLocator

    base = result.uniform_profile
    nonzero = base > 0
    distance = np.arange(len(base))[nonzero]
    ax.axhline(1, color=GREY, linewidth=0.8, linestyle=(0, (4, 3)))
    shapes = np.unique(result.bias_profile[layer][:, nonzero].round(9), axis=0)
    for shape in shapes[~np.isnan(shapes).any(1)]:
        ax.plot(distance, np.maximum(shape / base[nonzero], 1e-4), color=INK, linewidth=0.7, linestyle=":")
    for j in range(result.pattern.shape[1]):
        line = np.maximum(result.profile[layer, j][nonzero] / base[nonzero], 1e-4)
        ax.plot(distance, line, color=COLOURS[_class(result, layer, j)], linewidth=1.3, alpha=0.9)
    ax.set_yscale("log")
    ax.set_ylim(4e-3, 250)
    ax.set_yticks((0.01, 0.1, 1, 10, 100), ("1/100", "1/10", "1", "10x", "100x"))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.set_title(f"layer {layer}", size=9, loc="left", pad=3)
    _clean(ax)
    ax.set_facecolor("#F6F7F9")
    ax.tick_params(labelsize=8)
    return ax


def _class(result: HeadHealth, layer: int, head: int) -> str:
    return tuple(COLOURS)[int(result.pattern[layer, head])]


def _reach_of(profile: np.ndarray, fraction: float = 0.95) -> float:
    """Return the distance that contains a fraction of a profile, interpolated between rings."""
    total = np.concatenate([[0.0], profile.cumsum()])
    return float(np.interp(fraction, total, np.arange(len(total)) - 0.5))


def _clean(ax: "Axes") -> None:
    clean_axes(ax)
    ax.tick_params(labelsize=9)


def _footnote(result: HeadHealth) -> str:
    h, w = result.grid
    t = result.thresholds
    letters = ", ".join(
        f"{letter} {kind}"
        for kind, letter in _LETTERS.items()
        if any(k.startswith(kind) for k in result.tokens)
    )
    numbered = len(result.paths) <= 16
    marks = "Numbers: % of attention on the strongest token" if numbered else "Letters: the sink"
    dotted = "  Dotted: the bias alone." if np.isfinite(result.bias_profile).any() else ""
    return (
        f"{counted(result.images, 'image')}, {h}x{w} patches.  Sink: one token receives over {100 * t.sink:.0f} % of "
        f"a head's attention; dead: over {100 * t.dead:.0f} %; local: over {100 * t.local:.0f} % stays within 3x3 "
        f"patches.\n{marks} ({letters}).  Profiles: one line per head, coloured by class; one scale for all "
        f"layers.{dotted}"
    )
