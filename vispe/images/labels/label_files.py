"""Reading of labels: scribbles, masks and annotations as class numbers.

Convention: 0 = unlabelled, 1..K = classes. Label images are never resized. If grey levels or colours are mapped to
class numbers, a note contains the mapping.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vispe.errors import InputError, OptionError, counted
from vispe.images.annotations.shapes import Shape
from vispe.images.labels.class_names import Level, Naming, read_names
from vispe.images.labels.class_values import named_classes
from vispe.images.labels.label_codes import decoded_labels, distinct_codes, label_codes, unpacked_levels
from vispe.images.labels.label_pages import in_all_pages, in_page_order
from vispe.images.labels.scribbles import draw_strokes, read_strokes
from vispe.images.labels.shape_labels import draw_shapes, shape_set
from vispe.images.labels.unlabelled_values import find_void_jointly
from vispe.images.orientation import Frame

MIN_PIXELS_PER_CLASS = 10
"""Number of labelled pixels of a class below which a note is written."""

_PAINTED = 0.5  # fraction of labelled pixels above which too many values indicate labels drawn onto the image


@dataclass(frozen=True, eq=False)
class Labels:
    """Class numbers of the pixels of one image.

    Attributes:
        values: (z, h, w) int32, 0 = unlabelled, 1..K.
        names: the K class names, in order.
        notes: notes for the user, such as the mapping of grey levels to classes.
        colors: (r, g, b) in 0..255 of each class if the file contains colours, otherwise None.
    """

    values: np.ndarray
    names: tuple[str, ...]
    notes: tuple[str, ...] = ()
    colors: tuple[tuple[int, int, int], ...] | None = None


def read_labels(
    path: str | Path,
    shape: tuple[int, int, int],
    *,
    classes: Sequence[str] | None = None,
    legend: str | Path | None = None,
    dense: bool = False,
    max_classes: int = 20,
    label_page: int | None = None,
    image: str | Path | None = None,
    frame: Frame | None = None,
) -> Labels:
    """Read scribbles, a mask, a JSON file of scribbles, or annotations of another program for one image.

    Label images: 0 = unlabelled, 1..K = classes; other grey levels (85, 170, 255) are ranked. In colour images each
    colour is a class, sorted by red, then green, then blue; black and transparent pixels are unlabelled. Palette
    images are read by index if entry 0 is black or transparent, otherwise by colour. Values are used as stored, also
    in MinIsWhite files. 255 in addition to consecutive class numbers from 0 or 1, as in Cityscapes, is unlabelled
    (`vispe.images.labels.unlabelled_values`). A file of 3 or 4 colour planes is a stack if the image has as many pages.

    JSON files contain ``[{"class": 1, "width": 3, "points": [[x, y], ...], "page": 0}, ...]``; a single point is a
    dot. GeoJSON of QuPath, ``.roi`` and ``RoiSet.zip`` of ImageJ and COCO JSON contain class names; without `classes`
    these are numbered in natural order. Where shapes overlap, the smaller one wins.

    Args:
        path: PNG, TIFF or BMP label image, ``.json``, ``.geojson``, ``.roi`` or ``.zip``.
        shape: (z, h, w) of the image.
        classes: names of the classes 1..K. Class numbers 1..K are never renumbered if it is set.
        legend: JSON file with names: ``["matrix", ...]``, ``{"1": "matrix", ...}``, or by grey level or
            colour, ``{"#ff0000": "matrix", ...}``.
        dense: every pixel is labelled, and 0 (or black) is a class.
        max_classes: largest number of distinct classes.
        label_page: page (from 0) of single-page labels if the image has several pages; for scribbles, the default
            page.
        image: the image file, whose name selects the annotations in a COCO file of several images.
        frame: `Micrograph.frame` of the image, by which labels of an image with an orientation tag are rotated.

    Raises:
        InputError: the file is unreadable or lossy (JPEG), its size or page count differs from the image,
            there are more than `max_classes` or fewer than 2 classes, or names do not match.
        OptionError: mutually exclusive options.

    Example:
        >>> import tempfile
        >>> import numpy as np
        >>> from PIL import Image
        >>> path = Path(tempfile.mkdtemp()) / "labels.png"
        >>> Image.fromarray(np.array([[0, 85, 170], [0, 85, 170]], np.uint8)).save(path)
        >>> read_labels(path, (1, 2, 3), classes=["matrix", "pore"]).values.tolist()
        [[[0, 1, 2], [0, 1, 2]]]
    """
    return read_label_set(
        [path],
        [shape],
        classes=classes,
        legend=legend,
        dense=dense,
        max_classes=max_classes,
        label_page=label_page,
        images=[image],
        frames=[frame],
    )[0]


def read_label_set(
    paths: Sequence[str | Path],
    shapes: Sequence[tuple[int, int, int]],
    *,
    classes: Sequence[str] | None = None,
    legend: str | Path | None = None,
    dense: bool = False,
    max_classes: int = 20,
    label_page: int | None = None,
    images: Sequence[str | Path | None] | None = None,
    frames: Sequence[Frame | None] | None = None,
    thin: bool = True,
) -> list[Labels]:
    """Read the labels of several images with a common class numbering; arguments as in `read_labels`.

    Grey levels, colours and names are mapped to classes jointly over all files, so a class that is missing in one
    file does not change the numbers of the others. At least two classes must be labelled in total. `thin` adds notes on
    classes with few labelled pixels.

    Raises:
        InputError: as `read_labels`.
        OptionError: mutually exclusive options.
    """
    files = [Path(p) for p in paths]
    image_paths = [None if i is None else Path(i) for i in images or [None] * len(files)]
    image_frames = [frame or Frame() for frame in frames or [None] * len(files)]
    drawings = shape_set(
        files, [s[1:] for s in shapes], image_paths, read_names(classes, legend), image_frames
    )
    naming = drawings.naming
    parts = [
        _read_levels(path, shape, naming, dense, max_classes, label_page, drawings.of.get(number), frame)
        for number, (path, shape, frame) in enumerate(zip(files, shapes, image_frames, strict=True))
    ]
    void, mapping = find_void_jointly(
        files, [(pixels, empty) for _, _, _, pixels, empty in parts], naming, dense
    )
    drawn_levels = [[level for level in levels if level != void] for _, levels, _, _, _ in parts]
    classes_of, names, colors, mapping_notes = named_classes(paths, drawn_levels, naming, dense, max_classes)
    mapping += mapping_notes
    colors = colors or drawings.colors
    out = []
    for number, (path, (index, levels, notes, _, _)) in enumerate(zip(paths, parts, strict=True)):
        table = np.array([0, *(classes_of.get(level, 0) for level in levels)], np.int32)
        values = table[index]
        notes = [
            *mapping,
            *drawings.notes.get(number, ()),
            *notes,
            *(thin_classes(Path(path), values[values > 0], names) if thin else ()),
        ]
        out.append(Labels(values, names, tuple(notes), colors))
    return out


def _read_levels(
    path: Path,
    shape: tuple[int, int, int],
    naming: Naming,
    dense: bool,
    max_classes: int,
    label_page: int | None,
    shapes: Sequence[Shape] | None,
    frame: Frame,
) -> tuple[np.ndarray, list[Level], list[str], dict[Level, int], int]:
    """Return the labels of one file as (z, h, w) indices into a list of levels, 0 = unlabelled; that list; and notes.

    For label images, also the number of pixels of each level and of unlabelled pixels.
    """
    if shapes is not None:
        if dense:
            raise OptionError(f"{path}: `dense` needs a label for every pixel, got shapes. Omit `dense`.")
        return (*draw_shapes(path, shapes, naming, shape, label_page, frame), {}, 0)
    if path.suffix.lower() == ".json":
        if dense:
            raise OptionError(f"{path}: `dense` needs a label for every pixel, got scribbles. Omit `dense`.")
        strokes = read_strokes(path, naming, 0 if label_page is None and shape[0] == 1 else label_page)
        return (*draw_strokes(path, strokes, shape, frame.hint()), {}, 0)
    decoded = in_page_order(path, decoded_labels(path, shape[1:]).as_pages(shape[0], label_page), frame)
    codes, is_colour, unlabelled = label_codes(path, decoded, by_index=False)
    codes[unlabelled if dense else unlabelled | (codes == 0)] = -1
    empty = int((codes < 0).sum())
    codes, notes = frame.fitted(path, codes, decoded.orientation, shape[1:])
    codes = in_all_pages(path, codes, shape, label_page, "labels", frame.hint())
    labelled = np.flatnonzero(codes >= 0)  # sparse for scribbles
    labelled_codes = codes.ravel()[labelled]
    present = distinct_codes(labelled_codes)
    fraction = len(labelled) / max(codes.size, 1)
    if len(present) > max_classes and fraction > _PAINTED and not dense:
        raise InputError(
            f"{path}: max_classes={max_classes}, got {counted(len(present), 'distinct value')} on "
            f"{100 * fraction:.0f} % of the pixels, probably a copy of the image with labels drawn onto it. Draw "
            "them on an empty layer (black or transparent) of the same size and save that layer alone, or, if these "
            "are labels, increase `max_classes`."
        )
    if len(present) > max(max_classes, 1000):
        raise InputError(
            f"{path}: max_classes={max_classes}, got {counted(len(present), 'distinct value')}, probably a "
            "photograph or an anti-aliased drawing. Draw without anti-aliasing (a pencil, not a brush)."
        )
    index = np.zeros(codes.shape, np.int32)
    index.ravel()[labelled] = np.searchsorted(present, labelled_codes) + 1
    levels = unpacked_levels(present, is_colour, decoded.pages.dtype == np.uint16)
    counts = np.bincount(index.ravel()[labelled], minlength=len(levels) + 1)[1:].tolist()
    return index, levels, [*decoded.notes, *notes], dict(zip(levels, counts, strict=True)), empty


def thin_classes(path: Path, classes: np.ndarray, names: Sequence[str]) -> list[str]:
    """Return a note for each class with few labelled pixels, or none; `classes` (n,) are those of labelled pixels."""
    notes = []
    for name, count in zip(names, np.bincount(classes, minlength=len(names) + 1)[1:], strict=True):
        if count == 0:
            notes.append(f"class {name!r} has no labelled pixels in {path.name}; it remains a class.")
        elif count < MIN_PIXELS_PER_CLASS:
            notes.append(
                f"class {name!r} has only {counted(count, 'labelled pixel')} in {path.name}; label more of it."
            )
    return notes
