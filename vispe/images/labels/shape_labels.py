"""Annotation shapes of other programs as labels: class and pixels of each shape."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from vispe.errors import InputError, counted, did_you_mean
from vispe.images.annotations.annotation_files import holds_shapes, read_shapes
from vispe.images.annotations.coverage import covered_pixels, overlap_notes
from vispe.images.annotations.shapes import Color, Shape
from vispe.images.file_search import natural
from vispe.images.labels.class_names import Level, Naming, checked_names, class_number
from vispe.images.orientation import Frame


@dataclass(frozen=True)
class ShapeSet:
    """Shapes of several label files with a common class naming.

    Attributes:
        of: shapes with a class, by the index of their file, for files with shapes only.
        naming: class names: those specified by the user, or those of all files in natural order.
        colors: colours of the classes if all are distinct, otherwise None.
        notes: notes by the index of the file.
    """

    of: Mapping[int, Sequence[Shape]]
    naming: Naming
    colors: tuple[Color, ...] | None
    notes: Mapping[int, list[str]]


def shape_set(
    paths: Sequence[Path],
    sizes: Sequence[tuple[int, int]],
    images: Sequence[Path | None],
    naming: Naming,
    frames: Sequence[Frame] | None = None,
) -> ShapeSet:
    """Read the shape files among label files.

    Args:
        paths: label files of any kind.
        sizes: height and width of the image of each file.
        images: image file of each label file, if known.
        naming: class names and levels specified by the user.
        frames: frame of each image, for files that contain its size; None for images without orientation tags.

    Raises:
        InputError: an unreadable file, a file without classes, or shape files mixed with label images without
            specified class names.
    """
    by_file, notes = {}, {}
    image_frames = frames or [Frame()] * len(paths)
    for number, (path, size, image, frame) in enumerate(zip(paths, sizes, images, image_frames, strict=True)):
        if holds_shapes(path):
            by_file[number], notes[number] = _classed(path, read_shapes(path, size, image, frame))
    if not by_file:
        return ShapeSet({}, naming, None, {})
    if not naming.names:
        others = [path for number, path in enumerate(paths) if number not in by_file]
        if others:
            raise InputError(
                f"{paths[next(iter(by_file))]} has class names and {others[0]} has class numbers. Set `classes` to the "
                "names of the classes 1, 2, ..."
            )
        labels = {label_of(shape) for shapes in by_file.values() for shape in shapes}
        names = checked_names(str(paths[0]), sorted(labels, key=natural))
        naming = replace(naming, names=names)
    colors = {}
    for shapes in by_file.values():
        for shape in shapes:
            if shape.color is not None:
                colors.setdefault(class_of(shape, naming), shape.color)
    class_colors = [colors.get(k) for k in range(1, len(naming.names) + 1)]
    distinct_colors = tuple(c for c in class_colors if c is not None)
    all_distinct = len(distinct_colors) == len(class_colors) == len(set(distinct_colors))
    return ShapeSet(by_file, naming, distinct_colors if all_distinct else None, notes)


def _classed(path: Path, shapes: Sequence[Shape]) -> tuple[list[Shape], list[str]]:
    """Return the shapes that are not empty and have a class, and notes on the skipped ones."""
    count, notes = len(shapes), []
    shapes = [shape for shape in shapes if not shape.empty]
    if empty := count - len(shapes):
        notes.append(f"{path.name}: skipped {counted(empty, 'shape')} with an empty geometry.")
    if count and not shapes:
        raise InputError(
            f"{path} has {counted(count, 'shape')}, all of them empty: coordinates are neither lists of parts nor "
            "pairs of numbers (x, y). Export them again."
        )
    ignored = [s for s in shapes if s.name is not None and s.name.endswith("*")]
    with_class = [s for s in shapes if (s.name or s.group) and s not in ignored]
    if ignored:
        kinds = ", ".join(sorted({str(s.name) for s in ignored}))
        notes.append(
            f"{path.name}: skipped {counted(len(ignored), 'shape')} of the class {kinds}, which QuPath ignores."
        )
    if n_without_class := len(shapes) - len(with_class) - len(ignored):
        notes.append(f"{path.name}: skipped {counted(n_without_class, 'shape')} without a class.")
    if not with_class:
        raise InputError(
            f"{path} has {counted(len(shapes), 'shape')}, none with a class. Assign a classification in QuPath, a "
            "group or a name such as pore-1 in ImageJ, or a category in COCO."
        )
    return with_class, notes


def label_of(shape: Shape) -> str:
    """Return the class name of a shape, 'class 2' if the file contains only a number."""
    return shape.name or f"class {shape.group}"


def class_of(shape: Shape, naming: Naming) -> int:
    """Return the class (1..K) of a shape.

    Raises:
        InputError: unknown class name or number.
    """
    names = naming.names
    if (number := class_number(label_of(shape), names)) is not None:
        return number
    if shape.name is None and 1 <= shape.group <= len(names):
        return shape.group
    hint = did_you_mean(label_of(shape), names)
    raise InputError(
        f"{shape.where}: the class must be one of {', '.join(names)}, got {label_of(shape)!r}.{hint}"
    )


def shape_pixels(
    path: Path,
    shapes: Sequence[Shape],
    naming: Naming,
    shape: tuple[int, int, int],
    page: int | None,
    frame: Frame,
) -> tuple[list[tuple[int, np.ndarray]], list[str]]:
    """Return the class and pixel indices of each shape, largest first (smaller ones overwrite), and notes.

    Raises:
        InputError: as `vispe.images.annotations.coverage.covered_pixels`.
    """
    default = 0 if page is None and shape[0] == 1 else page
    covered, notes = covered_pixels(path, shapes, shape, default, frame)
    class_pixels = [(class_of(each, naming), pixels) for each, pixels in covered]
    return class_pixels, notes + list(overlap_notes(path, class_pixels))


def draw_shapes(
    path: Path,
    shapes: Sequence[Shape],
    naming: Naming,
    shape: tuple[int, int, int],
    page: int | None,
    frame: Frame,
) -> tuple[np.ndarray, list[Level], list[str]]:
    """Draw shapes, smaller ones over larger ones; returns as `vispe.images.labels.scribbles.draw_strokes`.

    Raises:
        InputError: as `vispe.images.annotations.coverage.covered_pixels`.
    """
    class_pixels, notes = shape_pixels(path, shapes, naming, shape, page, frame)
    classes = sorted({k for k, _ in class_pixels})
    index = np.zeros(shape, np.int64)
    for k, pixels in class_pixels:
        index.ravel()[pixels] = classes.index(k) + 1
    return index, [level_of(k, naming) for k in classes], notes


def level_of(k: int, naming: Naming) -> Level:
    """Return the level of class k, as in scribbles that name the class."""
    return naming.levels[k - 1] if naming.levels else (k,)


def draw_truth(
    path: Path,
    image: Path | None,
    shape: tuple[int, int, int],
    names: Sequence[str] | None,
    page: int | None,
    note: Callable[[str], None] | None,
    frame: Frame | None = None,
) -> np.ndarray:
    """Return the ground-truth classes (pages, h, w) int32 of annotation shapes, 0 outside of all shapes.

    Args:
        path: shape file.
        image: its image file, if known.
        shape: (pages, h, w) of the image.
        names: names of the classes 1..K; None numbers those of the file in natural order.
        page: page of shapes without one.
        note: called with notes for the user.
        frame: frame of the image.

    Raises:
        InputError: a shape of an unknown class, or an unreadable file.
    """
    frame = frame or Frame()
    shapes = shape_set([path], [shape[1:]], [image], Naming(tuple(names or ())), [frame])
    class_pixels, notes = shape_pixels(path, shapes.of[0], shapes.naming, shape, page, frame)
    out = np.zeros(shape, np.int32)
    for k, pixels in class_pixels:
        out.ravel()[pixels] = k
    unlabelled = 100 * float((out == 0).mean())
    if unlabelled:
        notes.append(
            f"{unlabelled:.3g} % of the pixels are outside of all shapes of {path.name} and are ignored in the score."
        )
    for text in (*shapes.notes[0], *notes):
        if note is not None:
            note(text)
    return out
