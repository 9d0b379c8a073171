"""Figure of the coordinates that multimodal schemes assign to the tokens of a stream.

matplotlib is imported on first use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, overload

import numpy as np

from vispe.errors import OptionError, ShapeError, counted, require
from vispe.evaluate.plots.plotted_scheme import PlottedScheme, Spec, plotted_scheme
from vispe.evaluate.plots.position_panels import draw_coordinates, draw_space
from vispe.multimodal import Scheme, Stream, create_scheme
from vispe.multimodal.streams.segments import Segment
from vispe.multimodal.streams.stream_text import parse_segments

if TYPE_CHECKING:
    from matplotlib.axes import Axes

EXAMPLE = "text:6 image:4x6 text:4 video:3x4x4@0.5 text:3"
_COLUMNS = 4  # max number of schemes per row
_WIDTH, _LINES, _SPACE, _LEFT, _TOP, _BOTTOM = 3.5, 2.8, 3.1, 0.75, 0.66, 0.5  # inches

Described = Stream | str | Sequence[Segment]


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
    described = _as_stream(stream)
    schemes = [plotted_scheme(create_scheme(s), described, s) for s in specs]
    if ax is None:
        axes = _figure(schemes)
        return axes[0] if one else axes
    if ax.name == "3d":
        draw_space(ax, schemes[0], _limits([schemes[0].in_space()[0]]))
    else:
        draw_coordinates(ax, schemes[0])
    return ax


def _as_stream(stream: Described) -> Stream:
    if isinstance(stream, str):
        stream = parse_segments(stream)
    if not isinstance(stream, Stream):
        stream = Stream.of([list(stream)])
    if len(stream.mask) != 1:
        raise ShapeError(
            f"plot_positions: stream must be a single sequence, got {counted(len(stream.mask), 'row')}. Pass one row."
        )
    return stream


def _limits(values: Sequence[np.ndarray], above: float = 0.04) -> tuple[float, float]:
    """Return the limits of an axis for all values, with margins as fractions of their range."""
    low, high = min(v.min() for v in values), max(v.max() for v in values)
    span = max(high - low, 1.0)
    return low - 0.04 * span, high + above * span


def _figure(drawn: Sequence[PlottedScheme]) -> list[Axes]:
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
        draw_coordinates(ax, one_scheme)
        ax.set_ylim(lines)
        ax.yaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))
        if k % columns:
            ax.tick_params(labelleft=False)
            ax.set_ylabel("")
        box = (left - 0.3, top - _LINES - _BOTTOM - _SPACE + 0.12, _WIDTH + 0.1, _SPACE)
        below = figure.add_axes(
            (box[0] / width, box[1] / height, box[2] / width, box[3] / height), projection="3d"
        )
        limits = _limits([one_scheme.in_space()[0]]) if len(one_scheme.ids) == 1 else space
        draw_space(below, one_scheme, limits)
        upper.append(ax)
    return upper
