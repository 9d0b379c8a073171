"""Reading of labels: scribbles, masks and annotations as class numbers.

Convention: 0 = unlabelled, 1..K = classes. Label images are never resized. If grey levels or colours are mapped to
class numbers, a note contains the mapping.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from vispe.errors import InputError, OptionError, counted
from vispe.images.annotations.shapes import Shape
from vispe.images.formats.decode import decode
from vispe.images.formats.decoded_image import Decoded
from vispe.images.labels.class_values import Level, Naming, named_classes, read_names
from vispe.images.labels.scribbles import draw_strokes, read_strokes
from vispe.images.labels.shape_labels import draw_shapes, shape_set
from vispe.images.labels.unlabelled_values import find_void_jointly
from vispe.images.orientation import Frame, planes_of

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
    codes = _placed(path, codes, shape, label_page, "labels", frame.hint())
    labelled = np.flatnonzero(codes >= 0)  # sparse for scribbles
    drawn = codes.ravel()[labelled]
    present = _distinct(drawn)
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
    index.ravel()[labelled] = np.searchsorted(present, drawn) + 1
    levels = unpacked(present, is_colour, decoded.pages.dtype == np.uint16)
    counts = np.bincount(index.ravel()[labelled], minlength=len(levels) + 1)[1:].tolist()
    return index, levels, [*decoded.notes, *notes], dict(zip(levels, counts, strict=True)), empty


def unpacked(codes: np.ndarray, is_colour: bool, deep: bool) -> list[Level]:
    """Convert codes of `label_codes` to levels; `deep` if colours have 16 bits per channel."""
    if not is_colour:
        return [(code,) for code in map(int, codes)]
    unit = 257 if deep else 1
    channels = [(code >> 32, code >> 16 & 65535, code & 65535) for code in map(int, codes)]
    return [tuple(round(value / unit) for value in level) for level in channels]


def _distinct(codes: np.ndarray) -> np.ndarray:
    """Return the sorted distinct codes without -1 (unlabelled)."""
    if codes.max(initial=0) < 65536:
        return np.flatnonzero(np.bincount(codes.ravel() + 1)[1:])
    present = np.unique(codes)
    return present[present >= 0]


def decoded_labels(path: Path, size: tuple[int, int] | None = None) -> Decoded:
    """Decode a label file; `size` is the height and width of the image.

    Raises:
        InputError: lossy compression, which changes label values.
    """
    decoded = decode(path, size=size)
    if decoded.lossy:
        kind = "WebP" if decoded.format == "WEBP" else "JPEG"
        raise InputError(f"{path}: {kind} compression changes label values. Save it as PNG or TIFF.")
    return decoded


def in_page_order(path: Path, decoded: Decoded, frame: Frame) -> Decoded:
    """Return a label file with its pages in the order of the image, by slice and time.

    Raises:
        InputError: the file has as many pages as the image, but other slices and times.
    """
    order = frame.page_order(path, planes_of(decoded.page_axes, range(len(decoded.pages))))
    if order is None:
        return decoded
    note = f"{path.name} has the axes of the image in another order: pages are matched by slice and time."
    return replace(decoded, pages=decoded.pages[order], notes=(*decoded.notes, note))


def label_codes(path: Path, decoded: Decoded, *, by_index: bool) -> tuple[np.ndarray, bool, np.ndarray]:
    """Return integer codes (z, h, w) int64, whether they are packed colours, and the transparent pixels.

    Raises:
        InputError: not 1 or 3 channels, non-integer or negative values, or values above 2^53.
    """
    pages = decoded.pages if decoded.step == 1 else decoded.pages // decoded.step
    transparent = np.zeros(pages.shape[:3], bool)
    if decoded.alpha:
        transparent, pages = pages[..., -1] == 0, pages[..., :-1]
    if decoded.palette is not None:
        transparent = np.isin(pages[..., 0], decoded.transparent)
        zero_is_background = not decoded.palette[0].any() or 0 in decoded.transparent
        if not (by_index or zero_is_background):
            pages = decoded.palette[pages[..., 0]]
    if pages.shape[-1] not in (1, 3):
        raise InputError(
            f"{path}: labels must have 1 channel (class numbers) or 3 (colours), got {pages.shape[-1]}."
        )
    if pages.dtype.kind == "f":
        if not (np.isfinite(pages).all() and np.array_equal(pages, np.rint(pages))):
            raise InputError(f"{path}: label values must be integers, got fractions or NaN.")
    elif pages.dtype.kind == "b":
        pages = pages.astype(np.uint8)
    if pages.size and pages.min() < 0:
        raise InputError(
            f"{path}: label values must be 0 or more, got {pages.min():g}. Save unlabelled pixels as 0 and number "
            "the classes from 1."
        )
    if pages.size and float(pages.max()) > 1 << 53:
        raise InputError(f"{path}: label values must be at most 2^53, got {pages.max():g}.")
    if pages.shape[-1] == 1 or (pages == pages[..., :1]).all():
        return pages[..., 0].astype(np.int64), False, transparent
    if pages.dtype.itemsize > 2:
        raise InputError(f"{path}: colour labels must have 8 or 16 bits, got {pages.dtype}.")
    r, g, b = (pages[..., i].astype(np.int64) for i in range(3))
    return r << 32 | g << 16 | b, True, transparent


def _placed(
    path: Path, codes: np.ndarray, shape: tuple[int, int, int], page: int | None, what: str, hint: str
) -> np.ndarray:
    """Check size and page count, and expand a single page to the pages of the image."""
    first = check_pages(path, codes.shape, shape, page, what, hint)
    if len(codes) == shape[0]:
        return codes
    out = np.full(shape, -1, codes.dtype)
    out[first] = codes[0]
    return out


def check_pages(
    path: Path,
    in_file: tuple[int, ...],
    shape: tuple[int, ...],
    page: int | None,
    what: str = "labels",
    hint: str = "",
) -> int:
    """Check the size and number of pages of labels or ground truth, and return their first page in the image.

    Args:
        path: the file.
        in_file: (pages, h, w) of the file.
        shape: (z, h, w) of the image.
        page: page of a single-page file, or None.
        what: 'labels', 'truth' or 'mask', for messages.
        hint: clause about the image, for messages.

    Raises:
        InputError: different size or number of pages, or a page that does not exist.
        OptionError: `page` is set for a file of several pages.
    """
    z, h, w = shape
    verb, plural = ("are", "have") if what == "labels" else ("is", "has")
    option = "page" if what == "truth" else "label_page"
    if in_file[1:] != (h, w):
        swapped = " (height and width are exchanged)" if in_file[1:] == (w, h) else ""
        raise InputError(
            f"{path}: the {what} {verb} {in_file[1]} x {in_file[2]} pixels (height x width), but the image is {h} x {w}"
            f"{hint or swapped}. Sizes must be equal; labels are never resized."
        )
    if in_file[0] not in (1, z):
        raise InputError(
            f"{path}: the {what} {plural} {counted(in_file[0], 'page')}, but the image has {z}. Numbers of pages "
            "must be equal."
        )
    if in_file[0] != 1 and page is not None:
        raise OptionError(
            f"{path}: {option} needs a single page, got {option}={page} and {counted(z, 'page')}. Omit `{option}`."
        )
    if in_file[0] == 1 and page is None and z > 1:
        raise InputError(
            f"{path}: the {what} {plural} 1 page, but the image has {z}. Set `{option}` to their page in the image."
        )
    if page is not None and not 0 <= page < z:
        raise InputError(f"{path}: {option} must be a page of the image (0 to {z - 1}), got {page}.")
    return page or 0


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
