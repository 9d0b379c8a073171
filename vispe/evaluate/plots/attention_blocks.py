"""Figure of the attention mask of a stream.

matplotlib is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vispe.errors import ShapeError, counted, require
from vispe.multimodal import Stream
from vispe.multimodal.streams.parallel_segments import MEMBER, SET
from vispe.utils.report.figure_style import GREY, INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KINDS = {"attends": "#B8C4CC", "in its own member": "#0072B2", "in another member": "#E69F00"}
"""Legend entries and their colours, distinguishable by colour-blind readers."""


def plot_blocks(stream: Stream, ax: Axes | None = None) -> Axes:
    """Plot which keys (columns) each query (row) of a stream may attend to.

    Args:
        stream: one sequence.
        ax: axes; a new figure by default.

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
            f"plot_blocks: stream must be a single sequence, got {counted(len(stream.mask), 'row')}. Pass one row."
        )
    if ax is None:
        ax = pyplot.figure(figsize=(4, 4), dpi=130).add_subplot()
    valid = stream.mask[0]
    allowed = stream.attention_mask()[0, 0][valid][:, valid].numpy().astype(int)
    legend = list(KINDS.items())
    if stream.blocks.parallel is None:
        legend = legend[:1]
    else:
        parallel = stream.blocks.parallel[stream.block].numpy()
        same = (parallel[:, None, SET] == parallel[:, SET]) & (parallel[:, SET] >= 0)
        same_member = same & (parallel[:, None, MEMBER] == parallel[:, MEMBER])
        allowed = allowed * np.where(same_member, 2, np.where(same, 3, 1))
    colours = ListedColormap(["white", *KINDS.values()])
    ax.imshow(allowed, cmap=colours, vmin=0, vmax=3, interpolation="nearest")
    for first in stream.blocks.first.tolist()[1:]:
        ax.axhline(first - 0.5, color=GREY, lw=0.4)
        ax.axvline(first - 0.5, color=GREY, lw=0.4)
    ax.set_xlabel("key", color=INK, size=9, labelpad=1)
    ax.set_ylabel("query", color=INK, size=9)
    ax.tick_params(length=0, labelsize=8.5, colors=INK)
    ax.spines[:].set_color(GREY)
    handles = [Patch(color=colour, label=name) for name, colour in legend]
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.11), "ncol": 3, "columnspacing": 1.0}
    ax.legend(handles=handles, fontsize=7.5, frameon=False, labelcolor=INK, **below)
    return ax
