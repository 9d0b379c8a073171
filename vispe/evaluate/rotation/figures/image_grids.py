"""Multi-panel figures: fingerprint of a model, and one image in all poses, as features and as labels.

Names supplied by users are never interpreted as markup.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vispe.errors import counted
from vispe.evaluate.rotation.metrics.fingerprint import Fingerprint
from vispe.evaluate.rotation.report import RotationReport
from vispe.segment.overlays import PALETTE
from vispe.utils.report import figure_style
from vispe.utils.report.figure_style import BLUE, GREY, INK
from vispe.utils.report.result import Grades

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GRADES = Grades(1.5, 3.0, ("no", "a faint", "a clear"))
"""Verdict on the SNR of a fingerprint, with limits chosen by us; 1 is the chance level."""


def fingerprint_words(fingerprint: Fingerprint) -> str:
    """Return the verdict on the SNR of a fingerprint in one sentence.

    Example:
        >>> import torch
        >>> from vispe.evaluate.rotation import fingerprint
        >>> pattern = fingerprint(lambda images: images + torch.arange(6.0), torch.rand(40, 1, 6, 6))
        >>> fingerprint_words(pattern).partition(' (')[0]
        'The mean of 40 maps shows a clear pattern that is fixed to the frame'
    """
    snr, of = fingerprint.snr, f"The mean of {counted(fingerprint.n_images, 'map')}"
    if np.isnan(snr):
        return f"{of} cannot be judged, because the maps are constant"
    if np.isinf(snr):
        return f"{of} equals each of them: they do not depend on the image"
    return f"{of} shows {GRADES.word(snr)} pattern that is fixed to the frame (SNR {snr:.3g}; chance gives 1)"


def plot_fingerprint(fingerprint: Fingerprint, channels: int = 10) -> Figure:
    """Plot the first principal components of the mean map, and the channels with the highest R² of position.

    The components share one symmetric colour scale.

    Args:
        fingerprint: return value of `vispe.evaluate.rotation.metrics.fingerprint.fingerprint`.
        channels: number of channels.

    Raises:
        MissingExtra: matplotlib is not installed.

    Example:
        >>> import torch
        >>> from vispe.evaluate.rotation import fingerprint
        >>> pattern = fingerprint(lambda images: images + torch.arange(6.0), torch.rand(40, 1, 6, 6))
        >>> plot_fingerprint(pattern).get_suptitle().partition(' (')[0]
        'The mean of 40 maps shows a clear pattern that is fixed to the frame'
    """
    count = len(fingerprint.components)
    figure = figure_style.new_figure(11.5, 3.6 + 0.2 * bool(fingerprint.notes))
    figure.suptitle(fingerprint_words(fingerprint), x=0.008, ha="left", size=12.5, color=INK)
    if fingerprint.notes:
        figure.supxlabel("  ".join(fingerprint.notes), x=0.008, ha="left", size=9.5, color=figure_style.SOFT)
    all_axes = figure.subplots(1, count + 1, width_ratios=[1.0] * count + [1.5])
    reach = float(np.abs(fingerprint.components).max(initial=0)) or 1.0
    image: Any = None
    for k, (ax, part) in enumerate(zip(all_axes, fingerprint.components, strict=False)):
        image = ax.imshow(part, cmap="PuOr", vmin=-reach, vmax=reach, interpolation="nearest")
        share = 100 * float(fingerprint.explained[k])
        figure_style.figure_title(ax, f"Component {k + 1}: {share:.0f} %")
        figure_style.hide_axes(ax)
    if image is not None:
        figure_style.scale(image, all_axes[:count], "score of the component", fraction=0.05, aspect=50)
    _channels(all_axes[-1], fingerprint, channels)
    return figure


def plot_poses(report: RotationReport) -> Figure:
    """Plot the first image, its features as colours, those of every pose with the pose undone, and their difference.

    Colours are the first three principal components of the original map, for all poses. The difference is the root mean
    square over the three colours, 0 to 1, on one scale for all poses.

    Raises:
        InputError: the report has no maps.
        MissingExtra: matplotlib is not installed.

    Example:
        >>> from vispe.evaluate.rotation import Measurement, RotationResult
        >>> result = RotationResult((Measurement("rot90", "error", np.array([0.1])),), ("a.png",))
        >>> maps = {name: np.random.rand(4, 4, 3) for name in ("identity", "rot90")}
        >>> report = RotationReport("vit", result, None, np.zeros((8, 8, 3)), maps)
        >>> type(plot_poses(report)).__name__
        'Figure'
    """
    figure_style.require_records(list(report.poses), "maps of poses", "vispe rotate")
    first, others = _split(report.poses)
    off = {name: np.sqrt(np.square(m - first).mean(-1)) for name, m in others.items()}
    top = max(0.1, max((float(d.max()) for d in off.values()), default=0.0))
    figure, left, right = _sheet(report.picture, len(others), first.shape)
    _show(left[-1], first, "its features")
    image: Any = None
    for (upper, lower), (name, moved) in zip(right, others.items(), strict=True):
        _show(upper, moved, name)
        label = f"off by {figure_style.short_number(float(np.sqrt(np.square(off[name]).mean())))}"
        image = _show(lower, off[name], label, cmap="cividis", vmin=0, vmax=top)
    if image is not None:
        label = "difference from the original features, in colour (0 to 1)"
        figure_style.scale(image, figure.axes, label, fraction=0.03, aspect=80)
    return figure


def plot_label_poses(report: RotationReport) -> Figure:
    """Plot the first image, its labels, those of every pose with the pose undone, and the pixels whose class changed.

    Raises:
        InputError: the report has no labels.
        MissingExtra: matplotlib is not installed.

    Example:
        >>> from vispe.evaluate.rotation import Measurement, RotationResult
        >>> result = RotationResult((Measurement("rot90", "error", np.array([0.1])),), ("a.png",))
        >>> maps = {name: np.ones((4, 4), int) for name in ("identity", "rot90")}
        >>> report = RotationReport("vit", result, None, np.zeros((4, 4, 3)), labels=maps)
        >>> type(plot_label_poses(report)).__name__
        'Figure'
    """
    figure_style.require_records(list(report.labels), "label maps of poses", "vispe rotate on a segmenter")
    first, others = _split(report.labels)
    figure, left, right = _sheet(report.picture, len(others), first.shape)
    highest = max(int(m.max(initial=0)) for m in report.labels.values())
    names = [*report.names, *(f"class {k + 1}" for k in range(len(report.names), highest))]
    _show(left[-1], _coloured(first), "its labels")
    for (upper, lower), (name, moved) in zip(right, others.items(), strict=True):
        changed = moved != first
        _show(upper, _coloured(moved), name)
        shown = np.where(changed[..., None], _rgb(figure_style.ORANGE), _rgb(figure_style.SHADE))
        _show(lower, shown, f"{100 * changed.mean():.1f} % changed")
    _class_key(figure, names)
    return figure


def _split(maps: dict[str, np.ndarray]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return the original map, and the others by name."""
    rest = "identity" if "identity" in maps else next(iter(maps))
    return maps[rest], {name: m for name, m in maps.items() if name != rest}


def _sheet(
    image: np.ndarray | None, count: int, shape: tuple[int, ...]
) -> tuple[Figure, list[Axes], list[tuple[Axes, Axes]]]:
    """Return a figure with the image and its map at the left, and a column of two axes per pose."""
    ratio = shape[0] / shape[1]
    stacked = 1 + (image is not None)
    side = 11.5 / (count + 2.2)
    figure = figure_style.new_figure(11.5, 2 * side * ratio + 1.35)
    grid = figure.add_gridspec(2, count + 1, width_ratios=[1.0] + [1.0] * count)
    left = [figure.add_subplot(grid[k, 0]) for k in range(2 - (stacked == 1))]
    if image is not None:
        _show(left[0], np.clip(image, 0, 1), "the image", interpolation=None)
    right = [(figure.add_subplot(grid[0, k + 1]), figure.add_subplot(grid[1, k + 1])) for k in range(count)]
    return figure, left, right


def _show(ax: Axes, values: np.ndarray, title: str, **how: Any) -> Any:
    image = ax.imshow(values, **{"interpolation": "nearest", **how})
    ax.set_title(title, size=10, color=INK, loc="left", pad=4, parse_math=False)
    figure_style.hide_axes(ax)
    return image


def _coloured(labels: np.ndarray) -> np.ndarray:
    """Return a label map as colours (H, W, 3) in [0, 1]; no data is white. Colours repeat after 20 classes."""
    table = np.concatenate([np.full((1, 3), 255), np.array(PALETTE)]) / 255
    return table[np.where(labels > 0, (labels - 1) % len(PALETTE) + 1, 0)]


def _class_key(figure: Figure, names: Sequence[str]) -> None:
    """Add a legend of the classes below the figure."""
    from matplotlib.patches import Patch

    handles = [
        Patch(facecolor=np.array(PALETTE[k % len(PALETTE)]) / 255, label=str(k)) for k in range(len(names))
    ]
    legend_options = {"loc": "outside lower left", "ncols": min(6, max(len(names), 1))}
    legend = figure.legend(handles=handles, frameon=False, fontsize=10, labelcolor=INK, **legend_options)
    # set later: a leading _ would drop the entry
    for text, name in zip(legend.get_texts(), names, strict=True):
        text.set_text(name)
        text.set_parse_math(False)


def _channels(ax: Axes, fingerprint: Fingerprint, count: int) -> None:
    """Plot bars of held-out R² of row and column from the best single channels, clipped at 0."""
    best = [c for c in fingerprint.top_channels(count) if np.isfinite(fingerprint.channel_r2[c])]
    values = np.maximum(fingerprint.channel_r2[best], 0)
    ax.bar(range(len(best)), values, 0.72, color=BLUE, alpha=0.85, linewidth=0)
    ax.set_ylim(0, 1)
    ax.set_xticks(range(len(best)), [str(c) for c in best])
    ax.set_xlabel("channel", color=INK)
    figure_style.figure_title(ax, "R² of row and column from one channel")
    figure_style.clean_axes(ax, "y")
    ax.tick_params(axis="x", labelsize=8.5)
    if not best:
        ax.text(0.5, 0.5, "no channel varies", transform=ax.transAxes, ha="center", color=GREY)


def _rgb(color: str) -> np.ndarray:
    from matplotlib.colors import to_rgb

    return np.array(to_rgb(color))
