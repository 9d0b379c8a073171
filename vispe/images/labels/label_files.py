"""Labels: scribbles and masks in, class numbers out.

The convention everywhere: 0 = unlabelled, 1..K = classes.  Label images are never resized and never guessed
at; when grey levels or colours have to be mapped to class numbers, a note gives the mapping.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vispe.errors import InputError, OptionError
from vispe.images.annotations.shapes import Shape
from vispe.images.formats.decode import decode
from vispe.images.formats.decoded_image import Decoded
from vispe.images.labels.class_values import Level, Naming, describe, named_classes, read_names
from vispe.images.labels.scribbles import draw_strokes, read_strokes
from vispe.images.labels.shape_labels import draw_shapes, draw_truth, holds_shapes, shape_set
from vispe.images.labels.unlabelled_values import counts_up, void_level, void_of
from vispe.images.orientation import Frame

FEW = 10
"""A class with fewer labelled pixels than this gets a note."""

_PAINTED = 0.5  # share of labelled pixels above which too many values are those of a picture


@dataclass(frozen=True, eq=False)
class Labels:
    """Class numbers for the pixels of one image.

    Attributes:
        values: (z, h, w) int32, 0 = unlabelled, 1..K.
        names: the K class names, in order.
        notes: one sentence for each thing that the user should know, such as how grey levels became classes.
        colors: (r, g, b) in 0..255 for each class when the file gave colours, else None.
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
    """Read scribbles, a mask, a JSON file of strokes, or shapes of another program for one image.

    A label image holds 0 = unlabelled and 1..K; other grey levels (85, 170, 255) are ranked.  In a colour
    image each colour is a class, in the order of red, then green, then blue value; black and transparent are
    unlabelled.  Palette images count by palette index when entry 0 is black or transparent, otherwise by
    colour. Numbers are taken as they are stored, also in files that count from white to black.  255 together with
    class numbers that count up from 0 or 1, as in masks of Cityscapes, is unlabelled (`vispe.images.labels.unlabelled_values`).  A
    file of 3 or 4 colour planes is a stack where the image has as many pages.  A JSON file
    holds ``[{"class": 1, "width": 3, "points": [[x, y], ...], "page": 0}, ...]``; one point draws a dot.
    GeoJSON of QuPath, ``.roi`` and ``RoiSet.zip`` of ImageJ and COCO JSON name their classes; without `classes`
    these are numbered in natural order of the names.  Where shapes overlap, the smaller one counts.

    Args:
        path: PNG, TIFF or BMP label image, ``.json``, ``.geojson``, ``.roi`` or ``.zip``.
        shape: (z, h, w) of the image.
        classes: names of the classes 1..K.  Then no class is ever renumbered while the numbers are 1..K.
        legend: JSON file with names: ``["matrix", ...]``, ``{"1": "matrix", ...}``, or by grey level or
            colour, ``{"#ff0000": "matrix", ...}``.
        dense: every pixel is labelled: 0 (or black) is a class too.
        max_classes: more distinct classes than this are refused.
        label_page: the page (from 0) that labels of one page belong to, when the image has several; for
            strokes, the page of strokes that name none.
        image: the file of the image, by whose name its annotations are found in a COCO file of several images.
        frame: `Micrograph.frame` of the image, by which labels of an image with an orientation tag are rotated.

    Raises:
        InputError: unreadable, lossy (JPEG), another size or page count, too many classes, fewer than 2, or
            names that do not fit.
        OptionError: options that exclude each other.
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
) -> list[Labels]:
    """Read the labels of several images with ONE numbering, for one classifier.

    Grey levels, colours and names are mapped to classes by those of all files together, so a class that is
    missing in one file cannot shift the others.  At least two classes must be labelled in the files together.
    """
    files = [Path(p) for p in paths]
    of = [None if i is None else Path(i) for i in images or [None] * len(files)]
    placed = [frame or Frame() for frame in frames or [None] * len(files)]
    drawings = shape_set(files, [s[1:] for s in shapes], of, read_names(classes, legend), placed)
    naming = drawings.naming
    parts = [
        _read_levels(path, shape, naming, dense, max_classes, label_page, drawings.of.get(number), frame)
        for number, (path, shape, frame) in enumerate(zip(files, shapes, placed, strict=True))
    ]
    void, mapping = void_of(files, [(pixels, empty) for _, _, _, pixels, empty in parts], naming, dense)
    drawn = [[level for level in levels if level != void] for _, levels, _, _, _ in parts]
    classes_of, names, colors, more = named_classes(paths, drawn, naming, dense, max_classes)
    mapping += more
    colors = colors or drawings.colors
    out = []
    for number, (path, (index, levels, notes, _, _)) in enumerate(zip(paths, parts, strict=True)):
        table = np.array([0, *(classes_of.get(level, 0) for level in levels)], np.int32)
        values = table[index]
        notes = [
            *mapping,
            *drawings.notes.get(number, ()),
            *notes,
            *thin_classes(Path(path), values[values > 0], names),
        ]
        out.append(Labels(values, names, tuple(notes), colors))
    return out


def read_truth(
    path: str | Path,
    shape: tuple[int, int, int],
    *,
    zero_is: str = "class",
    n_classes: int | None = None,
    page: int | None = None,
    names: Sequence[str] | None = None,
    image: str | Path | None = None,
    note: Callable[[str], None] | None = None,
    frame: Frame | None = None,
) -> np.ndarray:
    """Read a ground-truth mask, or shapes, as (z, h, w) int32 with 1..K and 0 = left out of the score.

    Masks come in two conventions, told apart by `zero_is`:

    - 'class': the pixel value is the class index from 0, as in most published masks; value v becomes v + 1
      and every pixel counts.
    - 'ignore': the label convention; values are 1..K as they are, and 0 is left out.

    A mask with exactly `n_classes` other levels, such as 0 and 255, is ranked; 255 with at least two class numbers
    without a gap is left out of the score, as Cityscapes and PASCAL VOC mean it.  Shapes of GeoJSON, ImageJ and COCO
    are of the classes that they name; pixels under no shape are left out, whatever `zero_is` says.

    Args:
        path: PNG, TIFF or BMP of one channel (or three equal ones), a palette image (the index counts), or a file of
            shapes as in `read_labels`.
        shape: (z, h, w) of the image.
        zero_is: 'class' or 'ignore'.
        n_classes: K when known; a larger class is an error.
        page: the page (from 0) that a mask of one page belongs to, when the image has several; the other
            pages are 0.
        names: of the classes 1..K, among which those of shapes must be; None numbers these in natural order.
        image: the file of the image, as in `read_labels`.
        note: called with what the user should know.
        frame: as in `read_labels`.

    Raises:
        InputError: unreadable, lossy, another size or page count, colours, names or values that are no classes.
        OptionError: unknown `zero_is`.
    """
    if zero_is not in ("class", "ignore"):
        raise OptionError(f"zero_is={zero_is!r} must be 'class' or 'ignore'.")
    path = Path(path)
    if holds_shapes(path):
        return draw_truth(path, None if image is None else Path(image), shape, names, page, note, frame)
    found = decoded_labels(path, shape[1:]).as_pages(shape[0], page)
    codes, is_colour, unlabelled = label_codes(path, found, by_index=True)
    if is_colour:
        raise InputError(f"{path} is a colour image; a truth mask holds one class number per pixel.")
    frame = frame or Frame()
    codes, notes = frame.fitted(path, np.where(unlabelled, -1, codes), found.orientation, shape[1:])
    codes = _placed(path, codes, shape, page, "truth", frame.hint())
    first = 0 if zero_is == "class" else 1
    levels = _distinct(codes)
    levels = levels[levels >= first]
    limit = (n_classes or 255) - 1 + first
    others = [(int(v),) for v in levels[:-1]]
    if counts_up(others) and others[-1][0] <= limit and void_level([(int(levels[-1]),)]):
        share = 100 * float((codes == levels[-1]).mean())
        notes.append(
            f"{path}: {levels[-1]} ({share:.3g} % of the pixels) marks no class and is left out of the score."
        )
        codes = np.where(codes == levels[-1], -1, codes)
        levels = levels[:-1]
    for text in notes:
        if note is not None:
            note(text)
    if levels.size and levels[-1] > limit:
        if n_classes is None or levels.size != n_classes:
            count = f"n_classes={n_classes}" if n_classes else "at most 255 classes"
            raise InputError(
                f"{path} holds the values {describe([(int(v),) for v in levels])}, but with {count} and "
                f"zero_is={zero_is} they must lie in {first} to {limit}; renumber the mask."
            )
        out = np.searchsorted(levels, codes) + 1
        return np.where(codes < first, 0, out).astype(np.int32)
    return np.where(codes < first, 0, codes + 1 - first).astype(np.int32)


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
    """One file as (z, h, w) indices into a list of levels, 0 = unlabelled; that list; and notes.

    Label images also give the pixels that each level covers, and those that are not labelled.
    """
    if shapes is not None:
        if dense:
            raise OptionError(
                f"{path} holds shapes, and dense says that every pixel is labelled; leave out dense."
            )
        return (*draw_shapes(path, shapes, naming, shape, label_page, frame.hint()), {}, 0)
    if path.suffix.lower() == ".json":
        if dense:
            raise OptionError(f"{path} holds strokes, which cannot label every pixel; leave out dense.")
        strokes = read_strokes(path, naming, 0 if label_page is None and shape[0] == 1 else label_page)
        return (*draw_strokes(path, strokes, shape, frame.hint()), {}, 0)
    found = decoded_labels(path, shape[1:]).as_pages(shape[0], label_page)
    codes, is_colour, unlabelled = label_codes(path, found, by_index=False)
    codes[unlabelled if dense else unlabelled | (codes == 0)] = -1
    empty = int((codes < 0).sum())
    codes, notes = frame.fitted(path, codes, found.orientation, shape[1:])
    codes = _placed(path, codes, shape, label_page, "labels", frame.hint())
    places = np.flatnonzero(codes >= 0)  # few where labels are scribbles
    drawn = codes.ravel()[places]
    present = _distinct(drawn)
    share = len(places) / max(codes.size, 1)
    if len(present) > max_classes and share > _PAINTED and not dense:
        raise InputError(
            f"{path}: found {len(present)} distinct values on {100 * share:.0f} % of the pixels, more than "
            f"max_classes={max_classes}; this looks like a copy of the picture with labels painted onto it: draw them "
            "on an empty layer (black or transparent) of the same size, and save that layer alone (or, if these are "
            "labels, raise max_classes)."
        )
    if len(present) > max(max_classes, 1000):
        raise InputError(
            f"{path}: found {len(present)} distinct classes, more than max_classes={max_classes}; this looks like a "
            "photograph or smoothed drawing, not labels; draw without smooth edges (a pencil, not a brush)."
        )
    index = np.zeros(codes.shape, np.int32)
    index.ravel()[places] = np.searchsorted(present, drawn) + 1
    levels = unpacked(present, is_colour, found.pages.dtype == np.uint16)
    counted = np.bincount(index.ravel()[places], minlength=len(levels) + 1)[1:].tolist()
    return index, levels, [*found.notes, *notes], dict(zip(levels, counted, strict=True)), empty


def unpacked(codes: np.ndarray, is_colour: bool, deep: bool) -> list[Level]:
    """Turn codes of `label_codes` into levels; `deep` says that colours have 16 bits a channel."""
    if not is_colour:
        return [(code,) for code in map(int, codes)]
    unit = 257 if deep else 1
    channels = [(code >> 32, code >> 16 & 65535, code & 65535) for code in map(int, codes)]
    return [tuple(round(value / unit) for value in level) for level in channels]


def _distinct(codes: np.ndarray) -> np.ndarray:
    """Sorted distinct codes from 0 up; -1, unlabelled, is not among them."""
    if codes.max(initial=0) < 65536:
        return np.flatnonzero(np.bincount(codes.ravel() + 1)[1:])
    present = np.unique(codes)
    return present[present >= 0]


def decoded_labels(path: Path, size: tuple[int, int] | None = None) -> Decoded:
    """Decode a label file, and refuse one whose values may have changed; `size` is that of the image."""
    found = decode(path, size=size)
    if found.lossy:
        kind = "WebP" if found.format == "WEBP" else "JPEG"
        raise InputError(f"{path} is {kind}-compressed, which changes label values; save it as PNG or TIFF.")
    return found


def label_codes(path: Path, found: Decoded, *, by_index: bool) -> tuple[np.ndarray, bool, np.ndarray]:
    """Whole-number codes (z, h, w) int64, whether they are packed colours, and the transparent pixels."""
    pages = found.pages if found.step == 1 else found.pages // found.step
    clear = np.zeros(pages.shape[:3], bool)
    if found.alpha:
        clear, pages = pages[..., -1] == 0, pages[..., :-1]
    if found.palette is not None:
        clear = np.isin(pages[..., 0], found.transparent)
        zero_is_background = not found.palette[0].any() or 0 in found.transparent
        if not (by_index or zero_is_background):
            pages = found.palette[pages[..., 0]]
    if pages.shape[-1] not in (1, 3):
        raise InputError(
            f"{path} has {pages.shape[-1]} channels; labels have 1 (class numbers) or 3 (colours)."
        )
    if pages.dtype.kind == "f":
        if not (np.isfinite(pages).all() and np.array_equal(pages, np.rint(pages))):
            raise InputError(f"{path} holds fractions or NaN; label values must be whole numbers.")
    elif pages.dtype.kind == "b":
        pages = pages.astype(np.uint8)
    if pages.size and pages.min() < 0:
        raise InputError(
            f"{path} holds the value {pages.min():g}; label values must be 0 or more. If it marks unlabelled pixels, "
            "save it as 0 and number the classes from 1."
        )
    if pages.size and float(pages.max()) > 1 << 53:
        raise InputError(f"{path} holds the value {pages.max():g}; label values must be at most 2^53.")
    if pages.shape[-1] == 1 or (pages == pages[..., :1]).all():
        return pages[..., 0].astype(np.int64), False, clear
    if pages.dtype.itemsize > 2:
        raise InputError(f"{path} holds {pages.dtype} colours; save colour labels with 8 or 16 bits.")
    r, g, b = (pages[..., i].astype(np.int64) for i in range(3))
    return r << 32 | g << 16 | b, True, clear


def _placed(
    path: Path, codes: np.ndarray, shape: tuple[int, int, int], page: int | None, what: str, hint: str
) -> np.ndarray:
    """Check size and page count, and put a single page where it belongs."""
    first = check_pages(path, codes.shape, shape, page, what, hint)
    if len(codes) == shape[0]:
        return codes
    out = np.full(shape, -1, codes.dtype)
    out[first] = codes[0]
    return out


def check_pages(
    path: Path,
    found: tuple[int, ...],
    shape: tuple[int, ...],
    page: int | None,
    what: str = "labels",
    hint: str = "",
) -> int:
    """Check the size and the number of pages of labels or truth, and return the first page that they belong to.

    Args:
        path: the file.
        found: (pages, h, w) of what it holds.
        shape: (z, h, w) of the image.
        page: which page one page belongs to; None says none.
        what: 'labels', 'truth' or 'mask', for messages.
        hint: a clause about the image, for messages.

    Raises:
        InputError: another size or number of pages, or a page that the image does not have.
        OptionError: `page` for labels of several pages.
    """
    z, h, w = shape
    verb, plural = ("are", "have") if what == "labels" else ("is", "has")
    option = "page" if what == "truth" else "label_page"
    if found[1:] != (h, w):
        turned = " (height and width are exchanged)" if found[1:] == (w, h) else ""
        raise InputError(
            f"{path}: the {what} {verb} {found[1]} x {found[2]} pixels (height x width), but the image is {h} x {w}"
            f"{hint or turned}; they must have the same size and are never resized."
        )
    if found[0] not in (1, z):
        raise InputError(
            f"{path}: the {what} {plural} {found[0]} pages, but the image has {z}; give as many."
        )
    if found[0] != 1 and page is not None:
        raise OptionError(f"{option}={page} was given, but {path} has a page for each of the {z} pages.")
    if found[0] == 1 and page is None and z > 1:
        raise InputError(
            f"{path}: the {what} {plural} 1 page, but the image has {z}; say which page they belong to with {option}."
        )
    if page is not None and not 0 <= page < z:
        raise InputError(f"{option}={page} is not a page of the image, which has {z} (0 to {z - 1}).")
    return page or 0


def thin_classes(path: Path, classes: np.ndarray, names: Sequence[str]) -> list[str]:
    """Return a note for each class with few labelled pixels, or none; `classes` are those of the labelled pixels."""
    notes = []
    for name, count in zip(names, np.bincount(classes, minlength=len(names) + 1)[1:], strict=True):
        if count == 0:
            notes.append(f"class {name!r} is not drawn in {path.name}; it is kept.")
        elif count < FEW:
            notes.append(f"class {name!r} has only {count} labelled pixels in {path.name}; draw more of it.")
    return notes
