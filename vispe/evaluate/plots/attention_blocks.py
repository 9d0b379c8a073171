"""Pictures of masks: which token of a stream sees which.

matplotlib is imported when something is drawn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vispe.errors import ShapeError, require
from vispe.multimodal import Stream
from vispe.multimodal.streams.parallel_segments import MEMBER, SET
from vispe.report.figure_style import GREY, INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KINDS = {"sees": "#B8C4CC", "in its own member": "#0072B2", "in another member": "#E69F00"}
"""What is drawn in which colour; they differ for colour-blind readers too."""


def plot_blocks(stream: Stream, ax: Axes | None = None) -> Axes:
    """Draw which keys (columns) every token (row) of a stream may attend to.

    Args:
        stream: one sequence.
        ax: where to draw; a new figure by default.

    Raises:
        MissingExtra: matplotlib is not installed.
        ShapeError: the stream has several rows.
    """
    require("matplotlib", "cli", "drawing masks")
    from matplotlib import pyplot
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    if len(stream.mask) != 1:
        raise ShapeError(
            f"One sequence is drawn at a time, got a stream of {len(stream.mask)} rows; give one row."
        )
    if ax is None:
        ax = pyplot.figure(figsize=(4, 4), dpi=130).add_subplot()
    valid = stream.mask[0]
    seen = stream.attention_mask()[0, 0][valid][:, valid].numpy().astype(int)
    shown = list(KINDS.items())
    if stream.blocks.parallel is None:
        shown = shown[:1]
    else:
        beside = stream.blocks.parallel[stream.block].numpy()
        same = (beside[:, None, SET] == beside[:, SET]) & (beside[:, SET] >= 0)
        own = same & (beside[:, None, MEMBER] == beside[:, MEMBER])
        seen = seen * np.where(own, 2, np.where(same, 3, 1))
    colours = ListedColormap(["white", *KINDS.values()])
    ax.imshow(seen, cmap=colours, vmin=0, vmax=3, interpolation="nearest")
    for first in stream.blocks.first.tolist()[1:]:
        ax.axhline(first - 0.5, color=GREY, lw=0.4)
        ax.axvline(first - 0.5, color=GREY, lw=0.4)
    ax.set_xlabel("key", color=INK, size=9, labelpad=1)
    ax.set_ylabel("query", color=INK, size=9)
    ax.tick_params(length=0, labelsize=8.5, colors=INK)
    ax.spines[:].set_color(GREY)
    handles = [Patch(color=colour, label=name) for name, colour in shown]
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.11), "ncol": 3, "columnspacing": 1.0}
    ax.legend(handles=handles, fontsize=7.5, frameon=False, labelcolor=INK, **below)
    return ax
