"""Figure of the coordinates that multimodal schemes assign to the tokens of a stream.

matplotlib is imported on first use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from vispe.errors import OptionError, ShapeError, counted, require
from vispe.multimodal import Scheme, Stream, create_scheme
from vispe.multimodal.streams.segments import IMAGE, THUMBNAIL, Segment
from vispe.multimodal.streams.stream_text import parse_segments
from vispe.utils.report.figure_style import GREY, INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes

EXAMPLE = "text:6 image:4x6 text:4 video:3x4x4@0.5 text:3"
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7")
"""Colours of axes, distinguishable by colour-blind readers."""

TINTS = {"image": "#E69F00", "video": "#56B4E9"}
_COLUMNS = 4  # max number of schemes per row
_WIDTH, _LINES, _SPACE, _LEFT, _TOP, _BOTTOM = 3.5, 2.8, 3.1, 0.75, 0.66, 0.5  # inches

Described = Stream | str | Sequence[Segment]
Spec = str | dict[str, Any] | Scheme


@dataclass(frozen=True)
class _Drawn:
    """Plotted data of a scheme: coordinates (axes, n), the next coordinate (axes,), and the kind of every token."""

    title: str
    names: tuple[str, ...]
    colours: tuple[str, ...]
    ids: np.ndarray
    following: np.ndarray
    visual: np.ndarray
    visuals: tuple[tuple[int, int, str, str], ...]  # first token, one after the last, kind, words
    cuts: np.ndarray  # first tokens of frames and tiles
    named: np.ndarray  # tokens of text that have the coordinates of cells

    def in_space(self) -> tuple[np.ndarray, tuple[str, ...]]:
        """Return three coordinates of all tokens and of the next one (3, n + 1), and their names."""
        every = np.concatenate([self.ids, self.following[:, None]], 1)
        if len(every) == 1:
            return np.repeat(every, 3, 0), ("position",) * 3
        step = len(every) // 3 if len(every) % 3 == 0 else 1
        return every[::step][:3], self.names[::step][:3]


@overload
def plot_positions(spec: Spec, stream: Described = EXAMPLE, ax: Axes | None = None) -> Axes: ...
@overload
def plot_positions(spec: Sequence[Spec], stream: Described = EXAMPLE, ax: None = None) -> list[Axes]: ...
def plot_positions(
    spec: Spec | Sequence[Spec], stream: Described = EXAMPLE, ax: Axes | None = None
) -> Axes | list[Axes]:
    """Plot the coordinates that multimodal schemes assign to the tokens of a stream.

    A new figure shows, for each scheme, all coordinates by token index, and below them the tokens in 3D: time, row and
    column, with text on the diagonal. A diamond marks the position of the next text token; a grey band marks text with
    the coordinates of image cells. Schemes with one coordinate lie on the diagonal; for schemes with four coordinates,
    of which the last is redundant, three are shown; for those with several positions per token, the first.

    Args:
        spec: a scheme by name or spec, such as `mrope_i`, or several schemes, which share their scales.
        stream: one sequence: a `Stream`, its segments, or text for `parse_segments`.
        ax: axes for a single scheme; a 3D axes for the 3D plot.

    Returns:
        The axes of the coordinates; a list, one per scheme, if `spec` is a list.

    Raises:
        MissingExtra: matplotlib is not installed.
        OptionError: no scheme, several schemes for one axes, or an invalid text of the stream.
        ShapeError: the stream has several rows.
    """
    require("matplotlib", "cli", "drawing positions")
    one = isinstance(spec, str | dict | Scheme)
    specs = [spec] if one else list(spec)
    if not specs:
        raise OptionError(
            "plot_positions: spec is empty, got []. Pass at least one scheme, such as 'mrope_i'."
        )
    if ax is not None and not one:
        raise OptionError(
            f"plot_positions: ax needs a single scheme, got {len(specs)}. Omit ax for several schemes."
        )
    described = _described(stream)
    drawn = [_coordinates(create_scheme(s), described, s) for s in specs]
    if ax is None:
        axes = _figure(drawn)
        return axes[0] if one else axes
    if ax.name == "3d":
        _draw_space(ax, drawn[0], _limits([drawn[0].in_space()[0]]))
    else:
        _draw_lines(ax, drawn[0])
    return ax


def _described(stream: Described) -> Stream:
    if isinstance(stream, str):
        stream = parse_segments(stream)
    if not isinstance(stream, Stream):
        stream = Stream.of([list(stream)])
    if len(stream.mask) != 1:
        raise ShapeError(
            f"plot_positions: stream must be a single sequence, got {counted(len(stream.mask), 'row')}. Pass one row."
        )
    return stream


def _coordinates(scheme: Scheme, stream: Stream, spec: Spec) -> _Drawn:
    coordinates = scheme.coordinates(stream)
    axes, blocks = scheme.axes, stream.blocks
    if scheme.axis_names:
        names, colours = scheme.axis_names, tuple(COLOURS[a % len(COLOURS)] for a in range(axes))
    elif axes % 3 == 0:
        names = tuple(
            f"{n} {k + 1}" if axes > 3 else n
            for n in (scheme.first_axis, "row", "column")
            for k in range(axes // 3)
        )
        colours = tuple(c for c in COLOURS[:3] for _ in range(axes // 3))
    else:
        names = ("position",) if axes == 1 else tuple(f"axis {a}" for a in range(axes))
        colours = tuple((INK,) if axes == 1 else (COLOURS[a % len(COLOURS)] for a in range(axes)))
    visuals = []
    for image in blocks.picture[blocks.visual].unique().tolist():
        parts = (blocks.picture == image).nonzero()[:, 0]
        start, end = int(blocks.first[parts[0]]), int(blocks.first[parts[-1]] + blocks.tokens[parts[-1]])
        t, h, w = blocks.size[parts[0]].tolist()
        kind = "image" if int(blocks.kind[parts[0]]) == IMAGE else "video"
        words = f"image {h} x {w}" if kind == "image" else f"video {t} x {h} x {w}"
        rows, columns = blocks.tile[parts[-1], 2:].tolist()
        if rows * columns > 1:
            small = " + thumbnail" if bool((blocks.tile[parts, 0] == THUMBNAIL).any()) else ""
            words = f"{rows} x {columns} tiles of {h} x {w}{small}"
        visuals.append((start, end, kind, words))
    return _Drawn(
        spec if isinstance(spec, str) else str(scheme), names, colours,
        coordinates.ids[:, stream.mask].numpy(), coordinates.decode(1)[:, 0, 0].numpy(),
        blocks.visual[stream.block].numpy(), tuple(visuals), _cuts(stream),
        np.zeros(0, int) if stream.coupled is None else stream.coupled[:, 0].numpy(),
    )  # fmt: skip


def _cuts(stream: Stream) -> np.ndarray:
    """Return the first tokens of frames and tiles, except those that start an image or video."""
    _, h, w = stream.blocks.size[stream.block].unbind(1)
    begins = stream.blocks.visual[stream.block] & (stream.index % (h * w) == 0)
    new = stream.blocks.picture[stream.block]
    begins[1:] &= new[1:] == new[:-1]
    return begins.nonzero()[:, 0].numpy()


def _limits(values: Sequence[np.ndarray], above: float = 0.04) -> tuple[float, float]:
    low, high = min(v.min() for v in values), max(v.max() for v in values)
    room = max(high - low, 1.0)
    return low - 0.04 * room, high + above * room


def _figure(drawn: Sequence[_Drawn]) -> list[Axes]:
    """Plot all schemes in a new figure and return the upper axes."""
    from matplotlib import pyplot  # pyplot, so that a notebook shows the figure
    from matplotlib.ticker import MaxNLocator

    bands = -(-len(drawn) // _COLUMNS)
    columns = -(-len(drawn) // bands)
    one = _TOP + _LINES + _SPACE + _BOTTOM
    width, height = _LEFT + columns * _WIDTH + 0.1, bands * one
    figure = pyplot.figure(figsize=(width, height), dpi=130, facecolor="white")
    lines = _limits([np.concatenate([d.ids.ravel(), d.following]) for d in drawn], 0.12)
    space = _limits([d.in_space()[0] for d in drawn if len(d.ids) > 1] or [d.in_space()[0] for d in drawn])
    upper: list[Axes] = []
    for k, one_scheme in enumerate(drawn):
        left, top = _LEFT + k % columns * _WIDTH, height - k // columns * one - _TOP
        ax = figure.add_axes((left / width, (top - _LINES) / height, (_WIDTH - 0.3) / width, _LINES / height))
        _draw_lines(ax, one_scheme)
        ax.set_ylim(lines)
        ax.yaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))
        if k % columns:
            ax.tick_params(labelleft=False)
            ax.set_ylabel("")
        box = (left - 0.3, top - _LINES - _BOTTOM - _SPACE + 0.12, _WIDTH + 0.1, _SPACE)
        below = figure.add_axes(
            (box[0] / width, box[1] / height, box[2] / width, box[3] / height), projection="3d"
        )
        own = _limits([one_scheme.in_space()[0]]) if len(one_scheme.ids) == 1 else space
        _draw_space(below, one_scheme, own)
        upper.append(ax)
    return upper


def _draw_lines(ax: Axes, drawn: _Drawn) -> None:
    """Plot all coordinates by token index; text tokens with equal coordinates in ink colour."""
    n = drawn.ids.shape[1]
    number = np.arange(n)
    for start, end, kind, _ in drawn.visuals:
        ax.axvspan(start - 0.5, end - 0.5, color=TINTS[kind], alpha=0.16, linewidth=0)
    for token in drawn.named:
        ax.axvspan(token - 0.5, token + 0.5, color=GREY, alpha=0.3, linewidth=0)
    for cut in drawn.cuts:
        ax.axvline(cut - 0.5, color="white", lw=0.9 * _smaller(n))
    _label_images(ax, drawn)
    same = (drawn.ids == drawn.ids[:1]).all(0) & ~drawn.visual
    axes = len(drawn.ids)
    for a, (values, colour) in enumerate(zip(drawn.ids, drawn.colours, strict=True)):
        separate = ~same if axes > 1 else drawn.visual
        group = a * 3 // axes if axes % 3 == 0 else a
        size = _smaller(n) * (3.2 if axes == 1 else 4.8 - 1.1 * min(group, 2))
        ax.plot(number[separate], values[separate], "o", ms=size, mew=0, color=colour)
    ax.plot(number[same], drawn.ids[0, same], "o", ms=3.2 * _smaller(n), mew=0, color=INK)
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


def _label_images(ax: Axes, drawn: _Drawn) -> None:
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


def _label_axes(ax: Axes, drawn: _Drawn) -> None:
    """Write the names of the coordinates in their colours into the empty upper left corner."""
    if len(drawn.names) == 1:
        return
    shown = dict.fromkeys(zip((n.rstrip(" 0123456789") for n in drawn.names), drawn.colours, strict=True))
    for k, (name, colour) in enumerate(shown):
        ax.annotate(name, (0, 1), (6, -6 - 11 * k), xycoords="axes fraction", textcoords="offset points",
                    size=9, weight="bold", color=colour, va="top")  # fmt: skip


def _draw_space(ax: Any, drawn: _Drawn, limits: tuple[float, float]) -> None:
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
