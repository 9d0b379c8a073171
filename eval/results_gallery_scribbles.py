"""Images of the gallery of results, and the rule of their scribbles.

The *guide* is the grey level, or a channel, smoothed with a Gaussian of 2 px, from which a Gaussian of a larger sigma
is subtracted if the image is lit unevenly. Candidates of a class are pixels whose guide is between two quantiles. A
scribble is a straight line that lies inside the candidates, in the first of eight directions, at least an eighth of the
image away from its border. The first is the one closest to the centre of the image, each other one farthest from those
before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import checkout  # noqa: F401  (finds vispe)
import numpy as np
from PIL import Image
from scipy.ndimage import gaussian_filter

from vispe.images.file_search import find_images

HAND = (0.0, 1.0)  # quantiles of classes whose scribbles were drawn by hand
WIDTH = 3  # of scribbles in pixels
STEP = 4  # distance of the centres of candidates in pixels


@dataclass(frozen=True)
class Example:
    """An image, its classes with quantiles of the guide, and options of the command.

    Args:
        classes: name to (lowest, highest) quantile of the guide; empty if the scribbles were drawn by hand.
        channel: 'grey', or a channel of RGB: 'red', 'green', 'blue'.
        uneven: sigma of the subtracted Gaussian in pixels; 0 for none.
        count: scribbles per class.
        length: of a scribble in pixels.
        objects: class that is counted.
        known: number of objects in the image, counted by eye; None if nobody knows it.
        options: more options of the command.
    """

    title: str
    classes: dict[str, tuple[float, float]]
    channel: str = "grey"
    uneven: float = 0
    count: int = 6
    length: int = 20
    objects: str = ""
    known: int | None = None
    options: tuple[str, ...] = ()


EXAMPLES = {
    "ihc": Example("Colon section, brown stain", dict.fromkeys(("gland", "stroma", "lumen"), HAND)),
    "cell": Example(
        "Cell, quantitative phase",
        {"background": (0, 0.9), "cell": (0.97, 1)},
        length=24,
        objects="cell",
        known=1,
    ),
    "coins": Example(
        "Coins on an unevenly lit ground",
        {"ground": (0.02, 0.45), "coin": (0.75, 1)},
        uneven=40,
        count=10,
        length=14,
        objects="coin",
        known=24,
    ),
    "retina": Example(
        "Retina, fundus photograph",
        {"tissue": (0.4, 0.9), "vessel": (0, 0.04)},
        channel="green",
        uneven=20,
        count=10,
        length=30,
        options=("--crop", "250:1150,350:1250"),
    ),
    "hubble_deep_field": Example(
        "Galaxies, Hubble deep field",
        {"sky": (0, 0.7), "galaxy": (0.985, 1)},
        count=8,
        length=8,
        objects="galaxy",
    ),
    "brick": Example("Brick wall", {"brick": (0.05, 0.5), "mortar": (0.93, 1)}, uneven=20, length=20),
}


def guide(name: str) -> np.ndarray:
    """Return the guide of an image, (h, w)."""
    (path,) = find_images([f"skimage:{name}"])
    example = EXAMPLES[name]
    image = np.asarray(Image.open(path), np.float64)
    if image.ndim == 3:
        channels = {"red": 0, "green": 1, "blue": 2}
        image = image.mean(2) if example.channel == "grey" else image[..., channels[example.channel]]
    smooth = gaussian_filter(image, 2)
    return smooth - gaussian_filter(image, example.uneven) if example.uneven else smooth


def area_of(example: Example, shape: tuple[int, int]) -> tuple[slice, slice]:
    """Return the rows and columns of the cropped region."""
    if "--crop" not in example.options:
        return slice(0, shape[0]), slice(0, shape[1])
    rows, columns = example.options[example.options.index("--crop") + 1].split(",")
    return slice(*map(int, rows.split(":"))), slice(*map(int, columns.split(":")))


def scribbles(name: str) -> list[dict[str, Any]]:
    """Return the scribbles of an image by the rule of the module's docstring."""
    example, values = EXAMPLES[name], guide(name)
    area = area_of(example, values.shape)
    margins = [(part.stop - part.start) // 8 for part in area]
    strokes = []
    for label, quantiles in example.classes.items():
        low, high = np.quantile(values[area], quantiles)
        inside = np.zeros(values.shape, bool)
        inner = tuple(
            slice(part.start + margin, part.stop - margin) for part, margin in zip(area, margins, strict=True)
        )
        inside[inner] = (values[inner] >= low) & (values[inner] <= high)
        lines = _lines(inside, example.length)
        middle = np.array([(part.start + part.stop) / 2 for part in area])
        centres = lines.mean(1)
        gap = -np.linalg.norm(centres - middle, axis=1)
        for number in range(example.count):
            best = int(gap.argmax())
            far = np.linalg.norm(centres - centres[best], axis=1)
            gap = far if number == 0 else np.minimum(gap, far)
            # points are x, y
            strokes.append({"class": label, "width": WIDTH, "points": lines[best][:, ::-1].tolist()})
    return strokes


def _lines(inside: np.ndarray, length: int) -> np.ndarray:
    """Return the ends (n, 2 ends, row and column) of straight lines inside, one for each centre."""
    rows, columns = (
        axis.ravel() for axis in np.mgrid[0 : inside.shape[0] : STEP, 0 : inside.shape[1] : STEP]
    )
    ends = np.full((len(rows), 2, 2), -1)
    padded = np.pad(inside, length)
    for angle in np.arange(8) * np.pi / 8:
        direction = np.array([np.sin(angle), np.cos(angle)])
        offsets = np.rint(np.linspace(-length / 2, length / 2, length + 1)[:, None] * direction).astype(int)
        within = padded[rows + length + offsets[:, :1], columns + length + offsets[:, 1:]].all(0)
        first = within & (ends[:, 0, 0] < 0)
        centres = np.stack([rows, columns], 1)[first]
        ends[first] = centres[:, None] + offsets[[0, -1]]
    return ends[ends[:, 0, 0] >= 0]
