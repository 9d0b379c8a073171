"""Sample data of the plugin: images of scikit-image with a few scribbles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vispe.errors import require
from vispe.images.file_search import find_images
from vispe.images.read import read_image
from vispe.segment.napari.layers import MARK, colormap

Layers = list[tuple[np.ndarray, dict[str, Any], str]]
Line = tuple[int, int, int, int]

_WIDTH = 2  # half width of a scribble in pixels
_CELL: tuple[Sequence[Line], ...] = (
    (
        (40, 80, 230, 600),
        (290, 60, 500, 110),
        (250, 480, 340, 330),
        (420, 520, 520, 420),
        (345, 340, 345, 420),
    ),
    ((395, 345, 450, 350), (400, 400, 455, 405)),
)
_TISSUE: tuple[Sequence[Line], ...] = (
    ((50, 80, 200, 180), (360, 30, 430, 190), (80, 340, 110, 480), (285, 350, 330, 450)),
    ((115, 245, 195, 330), (235, 290, 310, 260), (395, 320, 400, 480), (470, 80, 490, 220)),
    ((10, 290, 20, 420), (325, 110, 368, 178), (440, 405, 445, 470)),
)


def cell() -> Layers:
    """Return a grey bright-field image of a cell, with scribbles on the background and on the cell."""
    return _with_scribbles(_read("cell")[..., 0], "cell", ("background", "cell"), _CELL)


def tissue() -> Layers:
    """Return a colour image of stained tissue, with scribbles on glands, stroma and empty regions."""
    return _with_scribbles(_read("ihc"), "tissue", ("gland", "stroma", "empty"), _TISSUE)


def textures() -> Layers:
    """Return three textures as a stack, without scribbles."""
    pages = np.stack([_read(name)[..., 0] for name in ("gravel", "grass", "brick")])
    return [(pages, {"name": "textures"}, "image")]


def _read(name: str) -> np.ndarray:
    (path,) = find_images([f"skimage:{name}"])
    return read_image(path).pages[0]


def _with_scribbles(
    image: np.ndarray, name: str, classes: Sequence[str], scribbles: Sequence[Sequence[Line]]
) -> Layers:
    """Return an image and its labels; scribbles are (x, y, x, y) for each class."""
    require("skimage", "cli", "A sample image")
    from skimage.draw import line

    labels = np.zeros(image.shape[:2], np.uint8)
    for number, lines in enumerate(scribbles):
        for x0, y0, x1, y1 in lines:
            rows, columns = line(y0, x0, y1, x1)
            for dy in range(-_WIDTH, _WIDTH + 1):
                for dx in range(-_WIDTH, _WIDTH + 1):
                    labels[rows + dy, columns + dx] = number + 1
    label_options = {
        "name": f"{name} labels",
        "colormap": colormap(),
        "opacity": 0.9,
        "metadata": {MARK: "labels", "vispe.names": list(classes)},
    }
    return [(image, {"name": name, "rgb": image.ndim == 3}, "image"), (labels, label_options, "labels")]
