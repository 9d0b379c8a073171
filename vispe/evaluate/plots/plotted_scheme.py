"""Coordinates that a multimodal scheme assigns to the tokens of a stream, with what a figure of them needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from vispe.multimodal import Scheme, Stream
from vispe.multimodal.streams.segments import IMAGE, THUMBNAIL
from vispe.utils.report.figure_style import INK

COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7")
"""Colours of axes, distinguishable by colour-blind readers."""

Spec = str | dict[str, Any] | Scheme


@dataclass(frozen=True)
class PlottedScheme:
    """Plotted data of a scheme on a stream of n tokens.

    Attributes:
        title: title of the figure.
        names: name of each coordinate.
        colours: colour of each coordinate.
        ids: coordinates (axes, n).
        following: coordinates of the next text token (axes,).
        visual: whether each token is of an image or video (n,).
        visuals: images and videos: first token, one after the last, kind, words.
        cuts: first tokens of frames and tiles.
        coupled: tokens of text that have the coordinates of cells.
    """

    title: str
    names: tuple[str, ...]
    colours: tuple[str, ...]
    ids: np.ndarray
    following: np.ndarray
    visual: np.ndarray
    visuals: tuple[tuple[int, int, str, str], ...]
    cuts: np.ndarray
    coupled: np.ndarray

    def in_space(self) -> tuple[np.ndarray, tuple[str, ...]]:
        """Return three coordinates of all tokens and of the next one (3, n + 1), and their names."""
        every = np.concatenate([self.ids, self.following[:, None]], 1)
        if len(every) == 1:
            return np.repeat(every, 3, 0), ("position",) * 3
        step = len(every) // 3 if len(every) % 3 == 0 else 1
        return every[::step][:3], self.names[::step][:3]


def plotted_scheme(scheme: Scheme, stream: Stream, spec: Spec) -> PlottedScheme:
    """Return the plotted data of a scheme on a stream of one row; `spec` is the title."""
    coordinates = scheme.coordinates(stream)
    names, colours = _names_and_colours(scheme)
    return PlottedScheme(
        title=spec if isinstance(spec, str) else str(scheme),
        names=names,
        colours=colours,
        ids=coordinates.ids[:, stream.mask].numpy(),
        following=coordinates.decode(1)[:, 0, 0].numpy(),
        visual=stream.blocks.visual[stream.block].numpy(),
        visuals=_visuals(stream),
        cuts=_cuts(stream),
        coupled=np.zeros(0, int) if stream.coupled is None else stream.coupled[:, 0].numpy(),
    )


def _names_and_colours(scheme: Scheme) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return name and colour of each coordinate."""
    axes = scheme.axes
    if scheme.axis_names:
        return scheme.axis_names, tuple(COLOURS[a % len(COLOURS)] for a in range(axes))
    if axes % 3 == 0:
        names = tuple(
            f"{n} {k + 1}" if axes > 3 else n
            for n in (scheme.first_axis, "row", "column")
            for k in range(axes // 3)
        )
        return names, tuple(c for c in COLOURS[:3] for _ in range(axes // 3))
    if axes == 1:
        return ("position",), (INK,)
    return tuple(f"axis {a}" for a in range(axes)), tuple(COLOURS[a % len(COLOURS)] for a in range(axes))


def _visuals(stream: Stream) -> tuple[tuple[int, int, str, str], ...]:
    """Return the images and videos: first token, one after the last, kind, words."""
    blocks, visuals = stream.blocks, []
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
    return tuple(visuals)


def _cuts(stream: Stream) -> np.ndarray:
    """Return the first tokens of frames and tiles, except those that start an image or video."""
    _, h, w = stream.blocks.size[stream.block].unbind(1)
    begins = stream.blocks.visual[stream.block] & (stream.index % (h * w) == 0)
    new = stream.blocks.picture[stream.block]
    begins[1:] &= new[1:] == new[:-1]
    return begins.nonzero()[:, 0].numpy()
