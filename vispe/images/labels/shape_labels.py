"""Annotations of other programs as labels: which class each shape is of, and which pixels it gets."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from vispe.errors import InputError, did_you_mean
from vispe.images.annotations.annotation_files import holds_shapes, read_shapes
from vispe.images.annotations.shapes import Color, Shape, overlapping, painted
from vispe.images.file_search import natural
from vispe.images.labels.class_values import Level, Naming, checked_names, class_number
from vispe.images.orientation import Frame


@dataclass(frozen=True)
class ShapeSet:
    """The shapes of several label files, with one naming of their classes.

    Attributes:
        of: shapes that have a class, by the number of the file; files of other kinds are not in it.
        naming: the names of the classes: those that the user gave, or all that the files have, in natural order.
        colors: of the classes, where every one has its own, else None.
        notes: by the number of the file.
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
    """Read all files of shapes among label files.

    Args:
        paths: label files of any kind.
        sizes: height and width of the image of each.
        images: the image of each, where it is known.
        naming: what the user said about the classes.
        frames: the frame of each image, for files that give its size; None for images without orientation tags.

    Raises:
        InputError: a file that cannot be read, or in which no shape has a class; files of shapes beside those of
            numbers, where nobody says which number is which name.
    """
    found, notes = {}, {}
    placed = frames or [Frame()] * len(paths)
    for number, (path, size, image, frame) in enumerate(zip(paths, sizes, images, placed, strict=True)):
        if holds_shapes(path):
            found[number], notes[number] = _classed(path, read_shapes(path, size, image, frame))
    if not found:
        return ShapeSet({}, naming, None, {})
    if not naming.names:
        others = [path for number, path in enumerate(paths) if number not in found]
        if others:
            raise InputError(
                f"{paths[next(iter(found))]} names its classes and {others[0]} numbers them; say with classes which "
                "names the numbers 1, 2, ... stand for."
            )
        labels = {label_of(shape) for shapes in found.values() for shape in shapes}
        names = checked_names(str(paths[0]), sorted(labels, key=natural))
        naming = replace(naming, names=names)
    colors = {}
    for shapes in found.values():
        for shape in shapes:
            if shape.color is not None:
                colors.setdefault(class_of(shape, naming), shape.color)
    listed = [colors.get(k) for k in range(1, len(naming.names) + 1)]
    own = tuple(c for c in listed if c is not None)
    distinct = len(own) == len(listed) == len(set(own))
    return ShapeSet(found, naming, own if distinct else None, notes)


def _classed(path: Path, shapes: Sequence[Shape]) -> tuple[list[Shape], list[str]]:
    """Skip empty shapes, and those without a class, with a note."""
    count, notes = len(shapes), []
    shapes = [shape for shape in shapes if not shape.empty]
    if empty := count - len(shapes):
        notes.append(f"{empty} shape(s) of {path.name} have an empty geometry and are not used.")
    if count and not shapes:
        raise InputError(
            f"{path} holds {count} shape(s), but all of them are empty: their coordinates are no list of parts and no "
            "pairs of numbers (x, y); export them again."
        )
    region = [s for s in shapes if s.name is not None and s.name.endswith("*")]
    named = [s for s in shapes if (s.name or s.group) and s not in region]
    if region:
        kinds = ", ".join(sorted({str(s.name) for s in region}))
        notes.append(
            f"{len(region)} shape(s) of {path.name} of the class {kinds}, which QuPath ignores, are not used."
        )
    if without := len(shapes) - len(named) - len(region):
        notes.append(f"{without} shape(s) of {path.name} have no class and are not used.")
    if not named:
        raise InputError(
            f"{path} holds {len(shapes)} shape(s), but none with a class; give them one: a classification in QuPath, a "
            "group or a name such as pore-1 in ImageJ, a category in COCO."
        )
    return named, notes


def label_of(shape: Shape) -> str:
    """Return the name of the class of a shape by itself: 'class 2' where the file only numbers it."""
    return shape.name or f"class {shape.group}"


def class_of(shape: Shape, naming: Naming) -> int:
    """Return the class (1..K) of a shape.

    Raises:
        InputError: a name or number that is not among the names.
    """
    names = naming.names
    if (number := class_number(label_of(shape), names)) is not None:
        return number
    if shape.name is None and 1 <= shape.group <= len(names):
        return shape.group
    hint = did_you_mean(label_of(shape), names)
    raise InputError(
        f"{shape.where} is of the class {label_of(shape)!r}; known are {', '.join(names)}.{hint}"
    )


def shape_places(
    path: Path,
    shapes: Sequence[Shape],
    naming: Naming,
    shape: tuple[int, int, int],
    page: int | None,
    hint: str = "",
) -> tuple[list[tuple[int, np.ndarray]], list[str]]:
    """Return the class and the places of each shape, the largest first so that a later one counts, and notes.

    Raises:
        InputError: as `vispe.images.annotations.shapes.painted`.
    """
    default = 0 if page is None and shape[0] == 1 else page
    found, notes = painted(path, shapes, shape, default, hint)
    drawn = [(class_of(each, naming), places) for each, places in found]
    return drawn, notes + list(overlapping(path, drawn))


def draw_shapes(
    path: Path,
    shapes: Sequence[Shape],
    naming: Naming,
    shape: tuple[int, int, int],
    page: int | None,
    hint: str = "",
) -> tuple[np.ndarray, list[Level], list[str]]:
    """Draw shapes as `vispe.images.labels.scribbles.draw_strokes` draws strokes, the smaller over the larger."""
    drawn, notes = shape_places(path, shapes, naming, shape, page, hint)
    classes = sorted({k for k, _ in drawn})
    index = np.zeros(shape, np.int64)
    for k, places in drawn:
        index.ravel()[places] = classes.index(k) + 1
    return index, [level_of(k, naming) for k in classes], notes


def level_of(k: int, naming: Naming) -> Level:
    """Return the level that stands for class k, as strokes that name it have it."""
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
    """Return the true classes (pages, h, w) int32 that shapes give, 0 where there is none.

    Args:
        path: a file of shapes.
        image: its image, where it is known.
        shape: of the image.
        names: of the classes 1..K; None numbers those of the file in natural order.
        page: of shapes that name none.
        note: called with what the user should know.
        frame: of the image.

    Raises:
        InputError: a shape of another class, or what cannot be read.
    """
    frame = frame or Frame()
    found = shape_set([path], [shape[1:]], [image], Naming(tuple(names or ())), [frame])
    drawn, notes = shape_places(path, found.of[0], found.naming, shape, page, frame.hint())
    out = np.zeros(shape, np.int32)
    for k, places in drawn:
        out.ravel()[places] = k
    left_out = 100 * float((out == 0).mean())
    if left_out:
        notes.append(
            f"{left_out:.3g} % of the pixels lie under no shape of {path.name} and are left out of the score."
        )
    for text in (*found.notes[0], *notes):
        if note is not None:
            note(text)
    return out
