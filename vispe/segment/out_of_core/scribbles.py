"""Labels of out-of-core images: only the labelled pixels are stored, by flat index."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from vispe.errors import InputError, OptionError, counted
from vispe.images.annotations.shapes import Shape
from vispe.images.labels.class_names import Level, Naming, read_names
from vispe.images.labels.class_values import named_classes
from vispe.images.labels.label_codes import decoded_labels, label_codes, unpacked_levels
from vispe.images.labels.label_files import thin_classes
from vispe.images.labels.label_pages import check_pages, in_page_order
from vispe.images.labels.scribbles import overlap_note, rasterized, read_strokes
from vispe.images.labels.shape_labels import level_of, shape_pixels, shape_set
from vispe.images.labels.unlabelled_values import find_void_jointly
from vispe.images.sidecars import match_labels
from vispe.segment.features.tiles import Region
from vispe.segment.out_of_core import is_store, output_stem
from vispe.segment.out_of_core.source.image import OutOfCoreImage
from vispe.segment.out_of_core.source.open_image import open_image
from vispe.segment.types import LabelOptions

_ROWS = 256  # rows of a label image per step


@dataclass(frozen=True, eq=False)
class Scribbles:
    """The labelled pixels of one image.

    Attributes:
        indices: (n,) int64, ascending: (page * h + y) * w + x.
        classes: (n,) int64, 1..K.
    """

    indices: np.ndarray
    classes: np.ndarray


def match_store_labels(
    labels: Sequence[Path], images: Sequence[Path], note: Callable[[str], None]
) -> dict[Path, Path]:
    """Assign each label file or store to its image, by name."""
    matched, unmatched = match_labels(images, labels, "labels", output_stem)
    for label in unmatched:
        note(f"{label} matches no image and is ignored.")
    if not matched:
        raise InputError(
            f"no labels file matches an image by name: got {labels[0].name} for images such as {images[0].name}. "
            "Use matching names, for example a.zarr and a_labels.png."
        )
    return matched


def read_scribbles(
    paths: Sequence[Path], images: Sequence[OutOfCoreImage], how: LabelOptions
) -> tuple[list[Scribbles], tuple[str, ...], tuple[tuple[int, int, int], ...] | None, list[str]]:
    """Read the labels of several images with a common numbering, as `read_label_set` does in memory.

    Args:
        paths: JSON scribbles, shapes, label images or Zarr stores; only JSON and stores may be larger than memory.
        images: image of each label file.
        how: options of label reading.

    Returns:
        The labelled pixels of each image, the K names, the K colours or None, and notes.

    Raises:
        InputError: as `read_label_set`.
        OptionError: `dense`, which labels every pixel.
    """
    if how.dense:
        raise OptionError("dense=True is not supported for images processed in blocks. Use scribbles.")
    sizes = [image.shape for image in images]
    frames = [image.frame for image in images]
    class_names = read_names(how.classes, how.legend)
    drawings = shape_set(paths, sizes, [image.path for image in images], class_names, frames)
    naming = drawings.naming
    parts = [
        _read(path, image, naming, how)
        if number not in drawings.of
        else (*_drawn(path, drawings.of[number], image, naming, how.label_page), 0)
        for number, (path, image) in enumerate(zip(paths, images, strict=True))
    ]
    level_counts = [
        (
            dict(zip(levels, np.bincount(index, minlength=len(levels)).tolist(), strict=True)),
            n_pixels - len(index),
        )
        for _, index, levels, _, n_pixels in parts
        if n_pixels
    ]
    void, void_notes = find_void_jointly(paths, level_counts, naming, False)
    used_levels = [[level for level in levels if level != void] for _, _, levels, _, _ in parts]
    classes_of, names, colors, notes = named_classes(paths, used_levels, naming, False, how.max_classes)
    notes = void_notes + notes
    colors = colors or drawings.colors
    notes += [text for notes_of_image in drawings.notes.values() for text in notes_of_image]
    scribbles = []
    for path, (indices, index, levels, notes_of_image, _) in zip(paths, parts, strict=True):
        classes = np.array([classes_of.get(level, 0) for level in levels], np.int64)[index]
        indices, classes = indices[classes > 0], classes[classes > 0]
        notes += notes_of_image + thin_classes(path, classes, names)
        scribbles.append(Scribbles(indices, classes))
    return scribbles, names, colors, notes


def _read(
    path: Path, image: OutOfCoreImage, naming: Naming, how: LabelOptions
) -> tuple[np.ndarray, np.ndarray, list[Level], list[str], int]:
    """Return flat indices, an index (n,) into a sorted list of levels, that list, notes, and the label image's size."""
    height, width = image.shape
    page = how.label_page
    if path.suffix.lower() == ".json" and not is_store(path):
        shape = (image.n_pages, height, width)
        strokes = read_strokes(path, naming, 0 if page is None and shape[0] == 1 else page)
        levels = sorted({s.level for s in strokes})
        indices_of_scribbles = [
            ((s.page * height + rows) * width + columns, np.full(len(rows), levels.index(s.level)))
            for s, rows, columns in rasterized(path, strokes, shape, image.frame.hint())
        ]
        indices, values = (
            np.concatenate([d[i] for d in indices_of_scribbles] or [np.zeros(0, np.int64)]) for i in (0, 1)
        )
        unique_indices, last = np.unique(indices[::-1], return_index=True)
        pairs = np.unique(np.stack([indices, values]), axis=1)[0]
        n_overlapping = len(np.unique(pairs[1:][pairs[1:] == pairs[:-1]]))
        return unique_indices, values[::-1][last], levels, overlap_note(path, n_overlapping), 0
    pieces, notes, deep = (_from_store if is_store(path) else _from_image_file)(path, image, page)
    labelled, n_pixels = [], 0
    for number, region, codes, colour in pieces:
        n_pixels += codes.size
        y, x = np.nonzero(codes > 0)
        labelled.append(((np.int64(number) * height + y + region.top) * width + x, codes[y, x], colour))
    has_colour = any(colour for _, _, colour in labelled)
    codes = [c if colour or not has_colour else c << 32 | c << 16 | c for _, c, colour in labelled]
    present, index = np.unique(np.concatenate(codes), return_inverse=True)
    levels = unpacked_levels(present, has_colour, deep)
    return np.concatenate([indices for indices, _, _ in labelled]), index, levels, list(notes), n_pixels


def _drawn(
    path: Path, shapes: Sequence[Shape], image: OutOfCoreImage, naming: Naming, page: int | None
) -> tuple[np.ndarray, np.ndarray, list[Level], list[str]]:
    """Return the first four results of `_read`, for shapes."""
    shape = (image.n_pages, *image.shape)
    indices_of_shapes, notes = shape_pixels(path, shapes, naming, shape, page, image.frame)
    classes = sorted({k for k, _ in indices_of_shapes})
    indices = np.concatenate([p for _, p in indices_of_shapes])
    values = np.concatenate([np.full(len(p), classes.index(k)) for k, p in indices_of_shapes])
    # later labels overwrite earlier ones: the first occurrence in reverse order
    unique_indices, last = np.unique(indices[::-1], return_index=True)
    return unique_indices, values[::-1][last], [level_of(k, naming) for k in classes], notes


Pieces = Iterator[tuple[int, Region, np.ndarray, bool]]
"""Page, rows, code of each pixel (0 and below: unlabelled), and whether codes are packed colours."""


def _from_store(path: Path, image: OutOfCoreImage, page: int | None) -> tuple[Pieces, Sequence[str], bool]:
    """Read labels in a store, strip by strip."""
    stored = open_image(path)
    count = stored.n_pages
    first = check_pages(path, (count, *stored.shape), (image.n_pages, *image.shape), page)
    if stored.channels != 1 or stored.dtype.kind == "f":
        raise InputError(
            f"{path} has {counted(stored.channels, 'channel')} of {stored.dtype}, but labels in a store must be "
            "integers of one channel."
        )

    order = image.frame.page_order(path, stored.frame.planes) or range(count)

    def pieces() -> Pieces:
        rows = max(_ROWS // stored.chunk[0], 1) * stored.chunk[0]
        for number in range(count):
            for top in range(0, image.shape[0], rows):
                region = Region(top, min(top + rows, image.shape[0]), 0, image.shape[1])
                values = stored.read(order[number], region)[..., 0]
                if (lowest := values.min()) < 0:
                    raise InputError(f"{path} contains {lowest}, but label values must be 0 or more.")
                yield first + number, region, values.astype(np.int64), False

    return pieces(), stored.notes, False


def _from_image_file(
    path: Path, image: OutOfCoreImage, page: int | None
) -> tuple[Pieces, Sequence[str], bool]:
    """Read labels in an image file, which is decoded completely, strip by strip."""
    decoded = in_page_order(path, decoded_labels(path).as_pages(image.n_pages, page), image.frame)
    pages, notes = image.frame.fitted(path, decoded.pages, decoded.orientation, image.shape)
    count, decoded = len(pages), replace(decoded, pages=pages)
    shape = (image.n_pages, *image.shape)
    first = check_pages(path, pages.shape[:3], shape, page, hint=image.frame.hint())

    def pieces() -> Pieces:
        for number in range(count):
            for top in range(0, image.shape[0], _ROWS):
                region = Region(top, min(top + _ROWS, image.shape[0]), 0, image.shape[1])
                strip = decoded.pages[number : number + 1, region.top : region.bottom]
                codes, colour, unlabelled = label_codes(path, replace(decoded, pages=strip), by_index=False)
                yield first + number, region, np.where(unlabelled, -1, codes)[0], colour

    return pieces(), [*decoded.notes, *notes], decoded.pages.dtype == np.uint16
