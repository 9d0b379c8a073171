"""Annotation shapes of other programs, and the pixels that they cover.

Coordinates are (x, y) in pixels from the corner of the image: the first pixel spans 0 to 1, with its centre at 0.5.
The readers convert the coordinates of each file format.
"""

from dataclasses import dataclass, replace

import numpy as np

from vispe.errors import InputError, counted
from vispe.images.annotations.rasterize import fill
from vispe.images.labels.scribbles import WIDEST
from vispe.images.labels.stroke_pixels import Stroke, stroke_pixels
from vispe.images.orientation import Frame, oriented

Color = tuple[int, int, int]


MAX_COORDINATE = 10_000_000
"""Largest coordinate of a point in pixels."""


@dataclass(frozen=True, eq=False)
class Shape:
    """One annotation or object.

    Attributes:
        where: file and index of the shape, for messages.
        name: class name, or None.
        group: class number if the file numbers classes (groups of ImageJ), otherwise 0.
        color: (r, g, b) in 0..255, or None.
        page: page from 0, or None if the file does not contain it.
        plane: slice and time (z, t) from 0, each None if the file does not contain it; None for neither.
        areas: polygons, each an outer ring (n, 2) and its holes.
        lines: polylines (n, 2) with their width in pixels; a single point is a dot.
        mask: first row, first column and (h, w) bool mask, or None.
    """

    where: str
    name: str | None = None
    group: int = 0
    color: Color | None = None
    page: int | None = None
    plane: tuple[int | None, int | None] | None = None
    areas: tuple[tuple[np.ndarray, ...], ...] = ()
    lines: tuple[tuple[np.ndarray, float], ...] = ()
    mask: tuple[int, int, np.ndarray] | None = None

    def page_in(self, frame: Frame) -> int | None:
        """Return the page in an image, None if the file does not contain it.

        Slices, times and pages count in the file of the image, also if some of its pages are selected.

        Raises:
            InputError: slice and time are not those of exactly one page, or the page is not selected.
        """
        if self.plane is None:
            return self._selected(self.page, frame)
        z, t = self.plane
        if not frame.planes:
            if z and t:
                raise InputError(
                    f"{self.where}: the pages of the image are along one axis, got slice {z} of time {t} (from 0)."
                )
            return self._selected(z or t or 0, frame)
        pages = [number for number, plane in enumerate(frame.planes) if plane == self.plane]
        if len(pages) != 1:
            raise InputError(
                f"{self.where}: slice and time (from 0) must be those of one page of the image, got slice {z} of "
                f"time {t}, which {counted(len(pages), 'page')} have."
            )
        return pages[0]

    def _selected(self, number: int | None, frame: Frame) -> int | None:
        """Return the index of a page of the file among the selected pages."""
        if number is None or not frame.selected:
            return number
        if number not in frame.selected:
            raise InputError(
                f"{self.where}: the page (from 0 in the file of the image) must be selected by `z`, got {number}."
            )
        return frame.selected.index(number)

    @property
    def empty(self) -> bool:
        """Whether the shape has neither points nor mask pixels."""
        return not self.areas and not self.lines and (self.mask is None or not self.mask[2].any())

    def oriented(self, size: tuple[int, int], tag: int) -> "Shape":
        """Return the shape transformed by an orientation tag, for an image of `size` (height, width)."""

        def points(xy: np.ndarray) -> np.ndarray:
            x, y = xy.T
            h, w = size
            if tag >= 5:
                x, y, h, w = y, x, w, h
            x = w - x if tag in (2, 3, 6, 7) else x
            y = h - y if tag in (3, 4, 7, 8) else y
            return np.stack([x, y], 1)

        mask = None
        if self.mask is not None:
            top, left, part = self.mask
            corners = np.array([[left, top], [left + part.shape[1], top + part.shape[0]]])
            left, top = points(corners).min(0).tolist()
            mask = (top, left, oriented(part[None], tag)[0])
        areas = tuple(tuple(points(ring) for ring in rings) for rings in self.areas)
        lines = tuple((points(line), width) for line, width in self.lines)
        return replace(self, areas=areas, lines=lines, mask=mask)

    def box(self) -> tuple[float, float, float, float]:
        """Return the bounding box of the points: left, top, right, bottom."""
        points = [ring for rings in self.areas for ring in rings] + [points for points, _ in self.lines]
        if self.mask is not None:
            top, left, mask = self.mask
            points.append(np.array([[left, top], [left + mask.shape[1], top + mask.shape[0]]]))
        points = np.concatenate([np.asarray(p, float) for p in points])
        return (*points.min(0), *points.max(0))

    def pens(self) -> list[Stroke]:
        """Return the lines as strokes."""
        return [_pen(points, width) for points, width in self.lines]

    def pixel_indices(self, h: int, w: int) -> np.ndarray:
        """Return the pixels that the shape covers in an image (h, w), as indices y * w + x, ascending (n,) int64."""
        pixels = [fill(rings, h, w) for rings in self.areas]
        for points, width in self.lines:
            pixels.append(stroke_pixels(_pen(points, width), h, w))
        if self.mask is not None:
            top, left, mask = self.mask
            y, x = np.nonzero(mask)
            y, x = y + top, x + left
            inside = (y >= 0) & (y < h) & (x >= 0) & (x < w)
            pixels.append((y[inside], x[inside]))
        if len(pixels) == 1 and self.areas:
            return pixels[0][0] * w + pixels[0][1]  # sorted and unique already
        rows, columns = (np.concatenate(p) for p in zip(*pixels, strict=True))
        return np.unique(rows.astype(np.int64) * w + columns)


def _pen(points: np.ndarray, width: float) -> Stroke:
    """Return a line as a stroke, whose origin is the centre of the first pixel."""
    return Stroke((0,), min(max(round(width), 1), WIDEST), points - 0.5, 0)


def checked_points(where: str, points: object, fewest: int) -> np.ndarray:
    """Return points as (n, 2) float64.

    Raises:
        InputError: points are not pairs of finite numbers, there are fewer than `fewest`, or one exceeds
            `MAX_COORDINATE`.
    """
    try:
        array = np.asarray(points)
    except (TypeError, ValueError, OverflowError):
        array = np.zeros(0)
    if array.dtype.kind not in "iuf" or array.ndim != 2 or array.shape[1] < 2 or len(array) < fewest:
        raise InputError(
            f"{where}: points must be {fewest} or more pairs of numbers (x, y), got {str(points)[:60]}."
        )
    array = array[:, :2].astype(np.float64)
    if not (np.abs(array) <= MAX_COORDINATE).all():  # also false for NaN
        raise InputError(
            f"{where}: coordinates must be finite and at most {MAX_COORDINATE} pixels. Export the file again."
        )
    return array
