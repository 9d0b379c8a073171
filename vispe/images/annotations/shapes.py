"""Shapes that people draw in other programs, and the pixels that they cover.

One frame for all of them: (x, y) in pixels from the corner of the image, so that the first pixel reaches from 0 to 1
and has its centre at 0.5.  The readers bring what a file holds into it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from vispe.errors import InputError
from vispe.images.annotations.rasterize import fill
from vispe.images.labels.scribbles import WIDEST, Stroke, check_work, stroke_pixels
from vispe.images.orientation import oriented

Color = tuple[int, int, int]

MOST_COVERED = 1 << 28
"""Pixels that all shapes of a file may cover, each as often as it is covered; more only for larger images."""

FARTHEST = 10_000_000
"""Pixels from the corner of the image to a point at most."""


@dataclass(frozen=True, eq=False)
class Shape:
    """One annotation or object.

    Attributes:
        where: the file and which of its shapes this is, for messages.
        name: the class; None where it has none.
        group: the number of the class where the file numbers them (groups of ImageJ), else 0.
        color: (r, g, b) in 0..255, or None.
        page: from 0; None where the file does not say.
        areas: polygons, each a ring (n, 2) and its holes.
        lines: polylines (n, 2) with their width in pixels; one point is a dot.
        mask: first row, first column and (h, w) bool of pixels, or None.
    """

    where: str
    name: str | None = None
    group: int = 0
    color: Color | None = None
    page: int | None = None
    areas: tuple[tuple[np.ndarray, ...], ...] = ()
    lines: tuple[tuple[np.ndarray, float], ...] = ()
    mask: tuple[int, int, np.ndarray] | None = None

    @property
    def empty(self) -> bool:
        """Whether the shape has no points and no mask, so that it marks nothing."""
        return not self.areas and not self.lines and (self.mask is None or not self.mask[2].any())

    def oriented(self, size: tuple[int, int], tag: int) -> "Shape":
        """Return the shape in the frame that an orientation tag makes of an image of `size` (height, width)."""

        def points(found: np.ndarray) -> np.ndarray:
            x, y = found.T
            h, w = size
            if tag >= 5:
                x, y, h, w = y, x, w, h
            x = w - x if tag in (2, 3, 6, 7) else x
            y = h - y if tag in (3, 4, 7, 8) else y
            return np.stack([x, y], 1)

        mask = None
        if self.mask is not None:
            top, left, part = self.mask
            whole = np.zeros(size, bool)
            whole[top : top + part.shape[0], left : left + part.shape[1]] = part
            mask = (0, 0, oriented(whole[None], tag)[0])
        areas = tuple(tuple(points(ring) for ring in rings) for rings in self.areas)
        lines = tuple((points(line), width) for line, width in self.lines)
        return replace(self, areas=areas, lines=lines, mask=mask)

    def box(self) -> tuple[float, float, float, float]:
        """Return left, top, right and bottom of the points of the shape."""
        points = [ring for rings in self.areas for ring in rings] + [points for points, _ in self.lines]
        if self.mask is not None:
            top, left, mask = self.mask
            points.append(np.array([[left, top], [left + mask.shape[1], top + mask.shape[0]]]))
        points = np.concatenate([np.asarray(p, float) for p in points])
        return (*points.min(0), *points.max(0))

    def pens(self) -> list[Stroke]:
        """Return the lines as strokes."""
        return [_pen(points, width) for points, width in self.lines]

    def places(self, h: int, w: int) -> np.ndarray:
        """Return the pixels of an image of h x w that the shape covers, as y * w + x, ascending (n,) int64."""
        found = [fill(rings, h, w) for rings in self.areas]
        for points, width in self.lines:
            found.append(stroke_pixels(_pen(points, width), h, w))
        if self.mask is not None:
            top, left, mask = self.mask
            y, x = np.nonzero(mask)
            y, x = y + top, x + left
            inside = (y >= 0) & (y < h) & (x >= 0) & (x < w)
            found.append((y[inside], x[inside]))
        if len(found) == 1 and self.areas:
            return found[0][0] * w + found[0][1]  # in order, each once
        rows, columns = (np.concatenate(p) for p in zip(*found, strict=True))
        return np.unique(rows.astype(np.int64) * w + columns)


def _pen(points: np.ndarray, width: float) -> Stroke:
    """Return a line as a stroke, which counts from the centre of the first pixel."""
    return Stroke((0,), min(max(round(width), 1), WIDEST), points - 0.5, 0)


def checked_points(where: str, points: object, fewest: int) -> np.ndarray:
    """Return points as (n, 2) float64.

    Raises:
        InputError: not pairs of finite numbers, fewer than `fewest`, or farther away than `FARTHEST`.
    """
    try:
        found = np.asarray(points)
    except (TypeError, ValueError, OverflowError):
        found = np.zeros(0)
    if found.dtype.kind not in "iuf" or found.ndim != 2 or found.shape[1] < 2 or len(found) < fewest:
        raise InputError(
            f"{where} has the points {str(points)[:60]}; they must be at least {fewest} pairs of numbers (x, y)."
        )
    found = found[:, :2].astype(np.float64)
    if not (np.abs(found) <= FARTHEST).all():  # NaN is refused too
        raise InputError(
            f"{where} has a point that is no number or farther than {FARTHEST} pixels away; export it again."
        )
    return found


def painted(
    path: Path, shapes: Sequence[Shape], shape: tuple[int, int, int], default_page: int | None, hint: str = ""
) -> tuple[list[tuple[Shape, np.ndarray]], list[str]]:
    """Find the pixels of every shape, the largest first: where shapes overlap, the smaller one counts.

    Args:
        path: the file, for notes.
        shapes: in any order; of two that are equally large the later one counts.
        shape: (pages, h, w) of the image.
        default_page: the page of shapes that name none.
        hint: a clause about the image, for messages.

    Returns:
        Each shape with the places that it covers, (page * h + y) * w + x, ascending; and notes.

    Raises:
        InputError: a shape that lies wholly outside the image, or on a page that the image does not have.
    """
    z, h, w = shape
    found, cut, empty, covered = [], 0, 0, 0
    most = max(MOST_COVERED, 4 * z * h * w)
    check_work(str(path), [pen for each in shapes for pen in each.pens()], h, w)
    for each in shapes:
        page = default_page if each.page is None else each.page
        if page is None:
            raise InputError(f"{each.where} names no page, but the image has {z}; give label_page.")
        if not 0 <= page < z:
            raise InputError(f"{each.where} is on page {page}, but the image has {z} (0 to {z - 1}).")
        left, top, right, bottom = each.box()
        if right < 0 or bottom < 0 or left > w or top > h:
            raise InputError(
                f"{each.where} lies outside the image of {w} x {h} pixels (x {left:g} to {right:g}, y {top:g} to "
                f"{bottom:g}){hint}; coordinates are pixels of the whole image at full size: check that it is the "
                "right one."
            )
        cut += left < 0 or top < 0 or right > w or bottom > h
        places = each.places(h, w)
        empty += not len(places)
        covered += len(places)
        if covered > most:
            raise InputError(
                f"{path}: its {len(shapes)} shapes cover more than {most / 1e6:.0f} million pixels, each counted as "
                "often as it is covered; remove shapes that lie on others."
            )
        found.append((each, places + page * h * w))
    notes = []
    if cut:
        notes.append(f"{cut} shape(s) of {path.name} reach beyond the image; only what lies inside is used.")
    if empty:
        notes.append(f"{empty} shape(s) of {path.name} cover the centre of no pixel and label nothing.")
    return sorted(found, key=lambda item: -len(item[1])), notes


def overlapping(path: Path, drawn: Sequence[tuple[int, np.ndarray]]) -> Iterator[str]:
    """Say how many pixels lie under shapes of two classes, where there are any.

    Args:
        path: the file.
        drawn: class and places of each shape.
    """
    classes = sorted({c for c, _ in drawn})
    size = 1 + max((int(p[-1]) for _, p in drawn if len(p)), default=-1)
    if len(classes) < 2:
        several = 0
    elif (
        sum(len(p) for _, p in drawn) > size // 16
    ):  # many pixels: a map of the image is smaller than their list
        times = np.zeros(size, np.uint8)
        for k in classes:
            mask = np.zeros(size, bool)
            for _, p in ((c, p) for c, p in drawn if c == k):
                mask[p] = True
            times += mask
        several = int((times > 1).sum())
    else:
        own = [np.unique(np.concatenate([p for c, p in drawn if c == k])) for k in classes]
        several = int((np.unique(np.concatenate(own), return_counts=True)[1] > 1).sum())
    if several:
        yield f"{several} pixels of {path.name} lie under shapes of two classes; the smaller shape counts."
