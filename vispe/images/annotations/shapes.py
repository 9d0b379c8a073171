"""Annotation shapes of other programs, and the pixels that they cover.

Coordinates are (x, y) in pixels from the corner of the image: the first pixel spans 0 to 1, with its centre at 0.5.
The readers convert the coordinates of each file format.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from vispe.errors import InputError, counted
from vispe.images.annotations.rasterize import fill
from vispe.images.labels.scribbles import WIDEST
from vispe.images.labels.stroke_pixels import Stroke, check_work, stroke_pixels
from vispe.images.orientation import Frame, oriented

Color = tuple[int, int, int]

MAX_COVERED_PIXELS = 1 << 28
"""Upper bound of the summed area of the shapes of a file in pixels; higher for larger images."""

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
            full = np.zeros(size, bool)
            full[top : top + part.shape[0], left : left + part.shape[1]] = part
            mask = (0, 0, oriented(full[None], tag)[0])
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


def painted(
    path: Path, shapes: Sequence[Shape], shape: tuple[int, int, int], default_page: int | None, frame: Frame
) -> tuple[list[tuple[Shape, np.ndarray]], list[str]]:
    """Return the pixels of every shape, largest first: where shapes overlap, the smaller one wins.

    Args:
        path: the file, for notes.
        shapes: shapes in any order; of two shapes of equal size, the later one wins.
        shape: (pages, h, w) of the image.
        default_page: page of shapes without one.
        frame: frame of the image.

    Returns:
        Each shape with the indices of its pixels, (page * h + y) * w + x, ascending; and notes.

    Raises:
        InputError: a shape lies completely outside the image, or on a page that does not exist.
    """
    z, h, w = shape
    covered_pixels, cut, empty, n_covered = [], 0, 0, 0
    most = max(MAX_COVERED_PIXELS, 4 * z * h * w)
    check_work(str(path), [pen for each in shapes for pen in each.pens()], h, w)
    for each in shapes:
        page = default_page if (own := each.page_in(frame)) is None else own
        if page is None:
            raise InputError(f"{each.where} has no page, but the image has {z}. Set `label_page`.")
        if not 0 <= page < z:
            raise InputError(f"{each.where}: the page must be 0 to {z - 1}, got {page}.")
        left, top, right, bottom = each.box()
        if right < 0 or bottom < 0 or left > w or top > h:
            raise InputError(
                f"{each.where} is outside the image of {w} x {h} pixels, got x {left:g} to {right:g}, y {top:g} to "
                f"{bottom:g}{frame.hint()}. Coordinates are pixels of the complete image at full resolution; check "
                "that the annotations belong to this image."
            )
        cut += left < 0 or top < 0 or right > w or bottom > h
        pixels = each.pixel_indices(h, w)
        empty += not len(pixels)
        n_covered += len(pixels)
        if n_covered > most:
            raise InputError(
                f"{path}: the total area of its {counted(len(shapes), 'shape')} exceeds {most / 1e6:.0f} million "
                "pixels. Remove overlapping shapes."
            )
        covered_pixels.append((each, pixels + page * h * w))
    notes = []
    if cut:
        notes.append(f"{path.name}: clipped {counted(cut, 'shape')} at the border of the image.")
    if empty:
        notes.append(f"{path.name}: skipped {counted(empty, 'shape')} without a pixel centre.")
    return sorted(covered_pixels, key=lambda item: -len(item[1])), notes


def overlapping(path: Path, drawn: Sequence[tuple[int, np.ndarray]]) -> Iterator[str]:
    """Yield a note on the number of pixels under shapes of different classes, if there are any.

    Args:
        path: the file.
        drawn: class and pixel indices of each shape.
    """
    classes = sorted({c for c, _ in drawn})
    size = 1 + max((int(p[-1]) for _, p in drawn if len(p)), default=-1)
    if len(classes) < 2:
        n_overlapping = 0
    elif sum(len(p) for _, p in drawn) > size // 16:
        # for many pixels, a map of the image needs less memory than a list of indices
        count = np.zeros(size, np.uint8)
        for k in classes:
            mask = np.zeros(size, bool)
            for _, p in ((c, p) for c, p in drawn if c == k):
                mask[p] = True
            count += mask
        n_overlapping = int((count > 1).sum())
    else:
        by_class = [np.unique(np.concatenate([p for c, p in drawn if c == k])) for k in classes]
        n_overlapping = int((np.unique(np.concatenate(by_class), return_counts=True)[1] > 1).sum())
    if n_overlapping:
        verb = "is" if n_overlapping == 1 else "are"
        yield (
            f"{counted(n_overlapping, 'pixel')} of {path.name} {verb} covered by shapes of different classes; the "
            "smaller wins."
        )
