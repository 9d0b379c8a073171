"""Pixels covered by the shapes of a file, and overlaps of different classes."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from vispe.errors import InputError, counted
from vispe.images.annotations.shapes import Shape
from vispe.images.labels.stroke_pixels import check_work
from vispe.images.orientation import Frame

MAX_COVERED_PIXELS = 1 << 28
"""Upper bound of the summed area of the shapes of a file in pixels; higher for larger images."""


def covered_pixels(
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
    pixels_of_shapes, cut, empty, n_covered = [], 0, 0, 0
    most = max(MAX_COVERED_PIXELS, 4 * z * h * w)
    check_work(str(path), [pen for each in shapes for pen in each.pens()], h, w)
    for each in shapes:
        page = default_page if (stored_page := each.page_in(frame)) is None else stored_page
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
        pixels_of_shapes.append((each, pixels + page * h * w))
    notes = []
    if cut:
        notes.append(f"{path.name}: clipped {counted(cut, 'shape')} at the border of the image.")
    if empty:
        notes.append(f"{path.name}: skipped {counted(empty, 'shape')} without a pixel centre.")
    return sorted(pixels_of_shapes, key=lambda item: -len(item[1])), notes


def overlap_notes(path: Path, drawn: Sequence[tuple[int, np.ndarray]]) -> Iterator[str]:
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
