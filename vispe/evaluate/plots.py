"""Pictures of what was measured: the positional probe, and what an encoding adds to attention.

matplotlib is imported when something is drawn.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vispe.base import Additive, Biased, Encoding, Rotary, bias_of, transform_of
from vispe.errors import OptionError, ShapeError, UnsupportedCombination, require
from vispe.evaluate.probe import ProbeResult
from vispe.grid import Grid
from vispe.registry import create_encoding

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREY, INK = "#0072B2", "#D55E00", "#8A949E", "#22282E"
_WORDS = {"lr": "Left to right", "ud": "Top to bottom", "diag": "Diagonal", "radial": "Centre to rim"}
_HEAD_DIM = 64


def plot_probe(result: ProbeResult, title: str = "") -> "Figure":
    """Draw what a probe found: true ramp and reading, scores of all targets, the telling channels.

    Args:
        result: what `positional_probe` returned.
        title: what was probed, such as the model's name.

    Returns:
        A figure; save it with `figure.savefig(path)`.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    require("matplotlib", "cli", "drawing a probe")
    from matplotlib.figure import Figure

    truth, read, mask = (result.example[key] for key in ("ramp", "prediction", "mask"))
    n = truth.shape[2]
    figure = Figure(figsize=(12, 2.7 + 2.9 * max(n, 2)), dpi=130, facecolor="white")
    inch = 1 / figure.get_figheight()
    colour = {"position": ORANGE, "no": BLUE}.get(result.verdict.split()[0], GREY)
    figure.text(0.04, 1 - 0.42 * inch, f"Positional probe: {title}" if title else "Positional probe", size=13)
    verdict = result.verdict[0].upper() + result.verdict[1:]
    figure.text(0.04, 1 - 0.82 * inch, verdict, size=17, weight="bold", color=colour)
    figure.text(0.04, 1 - 1.10 * inch, "  ".join(result.notes), size=10, color=INK)
    figure.text(0.04, 0.22 * inch, _footnote(result), size=9, color=GREY, linespacing=1.5)
    box = {"top": 1 - 1.55 * inch, "bottom": 1.15 * inch}
    shape = (n, 2) if n > 1 else (2, 1)
    maps = figure.add_gridspec(*shape, left=0.04, right=0.55, wspace=0.08, hspace=0.22, **box)
    parts = result.rows[0].target.split("+") if n > 1 else [result.rows[0].target]
    for k, part in enumerate(parts):
        words = _WORDS.get(part, part)
        left, right = (figure.add_subplot(maps[2 * k + j]) for j in (0, 1))
        _draw_map(left, truth[..., k], f"{words}: the truth")
        rows, cols = np.nonzero(mask)
        left.scatter(cols, rows, s=14, color="white", edgecolor=INK, linewidth=0.7)
        image = _draw_map(right, read[..., k], f"{words}: read from the features")
        bar = figure.colorbar(image, ax=[left, right], fraction=0.025, pad=0.02, ticks=(0, 0.5, 1))
        bar.outline.set_visible(False)
        bar.ax.tick_params(length=0, labelsize=9, colors=INK)
    bars = figure.add_gridspec(2, 1, left=0.665, right=0.925, hspace=0.36, **box)
    _draw_scores(figure.add_subplot(bars[0]), result)
    _draw_channels(figure.add_subplot(bars[1]), result)
    return figure


def plot_bias(
    spec: Any,
    grid: Grid | tuple[int, int],
    query: tuple[int, int] | None = None,
    ax: "Axes | None" = None,
    *,
    head: int | None = None,
    num_heads: int = 8,
    layer: int = 0,
) -> "Axes":
    """Draw how an encoding treats every patch as seen from one query patch.

    A bias is drawn as it is added to the logits; a rotary encoding as the score of equal queries and keys, 1
    at the query; an additive one as the cosine similarity of the vectors that it adds.

    Args:
        spec: an encoding, see `create_encoding`; learned parameters are as freshly initialised (seed 0).
        grid: patches (h, w), or a `Grid`.
        query: row and column of the query patch; the centre by default.
        ax: where to draw; a new figure by default.
        head: which head; the mean over heads by default.
        num_heads: heads of the imagined host, whose head width is 64.
        layer: block of the imagined host.

    Raises:
        ShapeError: a grid that is not 2-axis, or a query outside of it.
        OptionError: no such head.
        UnsupportedCombination: the encoding has nothing to draw in this block.
    """
    require("matplotlib", "cli", "drawing an encoding")
    grid = grid if isinstance(grid, Grid) else Grid(tuple(grid))
    if grid.axes != 2:
        raise ShapeError(f"plot_bias draws grids (h, w), got {grid.shape}.")
    h, w = grid.shape
    row, col = query = (h // 2, w // 2) if query is None else (int(query[0]), int(query[1]))
    if not (0 <= row < h and 0 <= col < w):
        raise ShapeError(
            f"The query {query} is not in the {h}x{w} grid; rows are 0 to {h - 1}, columns 0 to {w - 1}."
        )
    if head is not None and not 0 <= head < num_heads:
        raise OptionError(f"There is no head {head} of {num_heads}; they are 0 to {num_heads - 1}.")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        width, depth = num_heads * _HEAD_DIM, max(12, layer + 1)
        encoding = create_encoding(spec, dim=width, num_heads=num_heads, depth=depth, grid=grid.shape).eval()
        values, words = _seen_from(encoding, grid, row * w + col, head, num_heads, layer)
    title = spec if isinstance(spec, str) else encoding.name
    return _draw_bias(values.reshape(h, w).numpy(), (row, col), words, title, ax)


def _seen_from(
    encoding: Encoding, grid: Grid, token: int, head: int | None, num_heads: int, layer: int
) -> tuple[torch.Tensor, str]:
    """Return one value per patch as seen from `token`, and what the values are."""
    pos = encoding.prepare(grid.positions())
    token += grid.prefix
    heads = slice(None) if head is None else slice(head, head + 1)
    of = "mean over heads" if head is None else f"head {head}"
    parts = encoding.parts()
    if (bias := bias_of(parts, pos, layer)) is not None:
        dense = bias.dense(pos, pos)
        dense = dense[:, heads] if dense.shape[1] > 1 else dense
        return dense[0, :, token, grid.prefix :].mean(0), f"added to the logits, {of}"
    if any(isinstance(part, Rotary) for part in parts):
        transform = transform_of(parts, pos, layer)
        ones = torch.ones(1, num_heads, grid.tokens, _HEAD_DIM)
        scores = transform.query(ones)[:, heads, token : token + 1] @ transform.key(ones)[:, heads].mT
        return scores[0, :, 0, grid.prefix :].mean(0) / _HEAD_DIM, f"score of equal query and key, {of}"
    tables = [part.table(pos)[0, grid.prefix :] for part in parts if isinstance(part, Additive)]
    if tables:
        unit = torch.nn.functional.normalize(sum(tables[1:], tables[0]), dim=-1)
        return unit @ unit[token - grid.prefix], "cosine similarity of the added vectors"
    kind = "no bias in this block" if any(isinstance(part, Biased) for part in parts) else "nothing per patch"
    raise UnsupportedCombination(f"{encoding.name} adds {kind} (layer={layer}), so there is nothing to draw.")


def _draw_bias(
    values: np.ndarray, query: tuple[int, int], words: str, title: str, ax: "Axes | None"
) -> "Axes":
    if ax is None:
        from matplotlib import pyplot  # so that a notebook shows it

        ax = pyplot.figure(figsize=(5.6, 5), dpi=130, layout="constrained").add_subplot()
    image = ax.imshow(values, cmap="viridis", interpolation="nearest")
    ax.plot(query[1], query[0], marker="o", markersize=9, color="white", markeredgecolor=INK)
    ax.set_title(title, size=12, color=INK)
    ax.set_xlabel("patch column", color=INK)
    ax.set_ylabel("patch row", color=INK)
    bar = ax.figure.colorbar(image, ax=ax, fraction=0.046, pad=0.03)
    bar.set_label(words, color=INK)
    bar.outline.set_visible(False)
    ax.spines[:].set_visible(False)
    return ax


def _draw_map(ax: "Axes", values: np.ndarray, title: str) -> Any:
    image = ax.imshow(values, cmap="viridis", vmin=0, vmax=1, interpolation="nearest")
    ax.set_title(title, size=10.5, color=INK, loc="left")
    ax.set_anchor("W")
    ax.set_xticks([])
    ax.set_yticks([])
    ax.spines[:].set_visible(False)
    return image


def _draw_scores(ax: "Axes", result: ProbeResult) -> None:
    """One dot per image and mask, a bar at the median; the axis ends at -1, where farther dots are drawn."""
    rows = result.rows[::-1]
    for y, row in enumerate(rows):
        values = row.r2_heldout.ravel()
        values = values[np.isfinite(values)]
        if not len(values):
            ax.text(0, y, " constant on this grid", va="center", size=9, color=GREY)
            continue
        colour = GREY if row.target == "random" else BLUE
        middle = float(np.median(values))
        ax.barh(y, max(middle, -1), height=0.62, color=colour, alpha=0.35, linewidth=0)
        jitter = np.linspace(-0.2, 0.2, len(values)) if len(values) > 1 else np.zeros(1)
        ax.scatter(np.maximum(values, -1), y + jitter, s=9, color=colour, linewidth=0)
        ax.text(1.04, y, f"{middle:.2f}", va="center", size=10, color=INK)
    ax.axvline(0, color=INK, linewidth=0.8)
    low = min(-0.25, *(max(np.nanmin(row.r2_heldout, initial=0), -1) - 0.05 for row in rows))
    ax.set_xlim(low, 1.0)
    if any((row.r2_heldout < -1).any() for row in rows):
        ax.set_xticks((-1, -0.5, 0, 0.5, 1), ("≤ -1", "-0.5", "0", "0.5", "1"))
    ax.set_yticks(range(len(rows)), [row.target for row in rows])
    ax.set_title("Held-out R² by target, with the median", size=10.5, loc="left")
    _clean(ax)


def _draw_channels(ax: "Axes", result: ProbeResult, n: int = 12) -> None:
    """Bars of the channels that read the headline target best on their own."""
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
    _clean(ax)
    ax.tick_params(axis="x", labelsize=8.5)


def _clean(ax: "Axes") -> None:
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0, labelsize=9.5, colors=INK)
    ax.title.set_color(INK)


def _footnote(result: ProbeResult) -> str:
    h, w = result.grid
    settings = result.settings
    fit = f"ridge, alpha {settings['alpha']:g}" if settings["regressor"] == "ridge" else "least squares"
    images = f"{result.n_images} image{'s' if result.n_images > 1 else ''}"
    return (
        f"Maps: first image and mask. White dots: the {result.n_samples} of {h}x{w} patches that were fitted "
        f"({fit}, {len(result.channel_r2)} channels).\n"
        f"Scores: patches that were not fitted; one dot per image and mask ({images}, "
        f"{settings['masks_per_image']} masks each). 1 = position is known, 0 or less = unknown; "
        f"random = noise, must not be readable."
    )
