"""Ground-truth masks from image files."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from vispe.errors import InputError, VispeError
from vispe.images.labels.class_values import describe
from vispe.images.labels.label_codes import decoded_labels, distinct_codes, label_codes
from vispe.images.labels.label_pages import in_all_pages, in_page_order
from vispe.images.labels.shape_labels import draw_truth, holds_shapes
from vispe.images.labels.unlabelled_values import counts_up, void_level
from vispe.images.orientation import Frame
from vispe.utils.options import checked


@checked
def read_truth(
    path: str | Path,
    shape: tuple[int, int, int],
    *,
    zero_is: Literal["class", "ignore"] = "class",
    n_classes: int | None = None,
    levels: Sequence[int] | None = None,
    page: int | None = None,
    names: Sequence[str] | None = None,
    image: str | Path | None = None,
    note: Callable[[str], None] | None = None,
    frame: Frame | None = None,
    on_values: Callable[[Mapping[int, int]], None] | None = None,
) -> np.ndarray:
    """Read a ground-truth mask, or annotation shapes, as (z, h, w) int32 with 1..K and 0 = ignored in the score.

    `zero_is` selects the convention of masks:

    - 'class': pixel values are class indices from 0, as in most published masks; value v becomes v + 1, and every
      pixel is scored.
    - 'ignore': the label convention; values are 1..K, and 0 is ignored.

    A mask with exactly `n_classes` other levels, such as 0 and 255, is ranked; 255 in addition to two or more class
    numbers is ignored, as in Cityscapes and PASCAL VOC (without `n_classes`, if these are consecutive). Shapes of
    GeoJSON, ImageJ and COCO have class names; pixels outside of all shapes are ignored for any `zero_is`.

    Args:
        path: PNG, TIFF or BMP of one channel (or three equal ones), a palette image (read by index), or a file of
            shapes as in `read_labels`.
        shape: (z, h, w) of the image.
        zero_is: 'class' or 'ignore'.
        n_classes: K if known; larger class numbers are an error.
        levels: the K values of the classes in ascending order, such as `joint_convention(...).levels`.
        page: page (from 0) of a single-page mask if the image has several pages; the other pages are 0.
        names: names of the classes 1..K, which must include the classes of shapes; None numbers the classes
            of shapes in natural order.
        image: the image file, as in `read_labels`.
        note: called with notes for the user.
        frame: see `read_labels`.
        on_values: called with the class of each value of a mask, 0 for an ignored one.

    Raises:
        InputError: the file is unreadable, lossy or coloured, its size or page count differs from the image,
            or names or values are not classes.
        OptionError: unknown `zero_is`.
    """
    path = Path(path)
    if holds_shapes(path):
        return draw_truth(path, None if image is None else Path(image), shape, names, page, note, frame)
    frame = frame or Frame()
    codes, orientation = _codes(path, shape, page, frame)
    codes, notes = frame.fitted(path, codes, orientation, shape[1:])
    codes = in_all_pages(path, codes, shape, page, "truth", frame.hint())
    first = 0 if zero_is == "class" else 1
    values = distinct_codes(codes)
    values = values[values >= first]
    limit = (n_classes or 255) - 1 + first
    void: dict[int, int] = {}
    if levels is None and (number := _void(values.tolist(), n_classes, first)) is not None:
        percentage = 100 * float((codes == number).mean())
        notes.append(
            f"{path}: {number} ({percentage:.3g} % of the pixels) is not a class and is ignored in the score."
        )
        codes = np.where(codes == number, -1, codes)
        void, values = {number: 0}, values[:-1]
    if levels is None and first == 0 and n_classes and values.size and values[0] > 0 and values[-1] <= limit:
        described = describe([(int(v),) for v in values])
        notes.append(
            f"{path}: no pixel is 0, and the values ({described}) are read as class numbers from 0. If 1 is the first "
            "class, set `zero_is=ignore`."
        )
    for text in notes:
        if note is not None:
            note(text)
    if levels is None and values.size and values[-1] > limit:
        levels = values.tolist()
        if n_classes is None or len(levels) != n_classes:
            count = f"n_classes={n_classes}" if n_classes else "at most 255 classes"
            advice = f"Store class numbers from {first} instead of grey levels"
            if n_classes:
                advice += f", or pass masks that have {n_classes} grey levels together"
            if counts_up([(v,) for v in levels]):
                advice = "Increase the number of classes, or correct the mask"
            raise InputError(
                f"{path}: values must be {first} to {limit} with {count} and zero_is={zero_is}, got "
                f"{describe([(int(v),) for v in values])}. {advice}."
            )
    if levels is not None and (unknown := sorted({*values.tolist()} - {*levels})):
        listed = ", ".join(map(str, levels))
        raise InputError(
            f"{path}: the value {unknown[0]} is not one of the grey levels of the classes, {listed}. Correct the mask."
        )
    if on_values is not None:
        classes = (values + 1 - first if levels is None else np.searchsorted(levels, values) + 1).tolist()
        on_values(dict(zip(values.tolist(), classes, strict=True)) | void)
    out = codes + 1 - first if levels is None else np.searchsorted(levels, codes) + 1
    return np.where(codes < first, 0, out).astype(np.int32)


def _void(values: Sequence[int], n_classes: int | None, first: int) -> int | None:
    """Return the largest of ascending values if it means 'ignored', since the others are class numbers."""
    *others, last = values or [-1]
    # not every image shows every class
    numbers = counts_up([(v,) for v in others]) or (
        n_classes is not None and len(others) > 1 and last > n_classes - 1 + first
    )
    is_void = numbers and others[-1] <= (n_classes or 255) - 1 + first and void_level([(last,)])
    return last if is_void else None


@dataclass(frozen=True)
class MaskConvention:
    """Meaning of the values of several masks.

    Attributes:
        from_one: masks to read with `zero_is='ignore'`.
        conflicts: masks that cannot be read, with the reason.
        levels: the grey levels of the classes 1..K, None for class numbers.
    """

    from_one: frozenset[Path] = frozenset()
    conflicts: Mapping[Path, str] = field(default_factory=dict[Path, str])
    levels: tuple[int, ...] | None = None


def joint_convention(
    shapes: Mapping[Path, tuple[int, int, int] | None], n_classes: int, zero_is: Literal["class", "ignore"]
) -> MaskConvention:
    """Return the meaning of the values of several masks, of which some lack a class.

    - Classes count from 1 for `zero_is='class'` if one of the masks has exactly the values 1..K. Such a mask may lack
      the last class, so that its values are also class numbers from 0.
    - Values that are not class numbers are grey levels if the masks together have K of them.

    Args:
        shapes: (z, h, w) of the image of each mask, None if unknown.
        n_classes: K.
        zero_is: as in `read_truth`.
    """
    if len(shapes) < 2:
        return MaskConvention()
    values = {path: v for path, shape in shapes.items() if (v := _values(path, shape)) is not None}
    first = 0 if zero_is == "class" else 1
    union = sorted({v for mask_values in values.values() for v in mask_values if v >= first})
    if len(union) == n_classes and union[-1] >= n_classes + first and _void(union, n_classes, first) is None:
        return MaskConvention(levels=tuple(union))
    one = next(
        (path for path, mask_values in values.items() if mask_values == [*range(1, n_classes + 1)]), None
    )
    if first or one is None:
        return MaskConvention()
    reason = (
        f"has the value 0, but {one.name} numbers the {n_classes} classes from 1. Set `zero_is=ignore` if 0 is "
        "unlabelled, or renumber the masks."
    )
    conflicts = {path: f"{path} {reason}" for path, mask_values in values.items() if 0 in mask_values}
    return MaskConvention(frozenset(shapes.keys() - conflicts.keys()), conflicts)


def _values(path: Path, shape: tuple[int, int, int] | None) -> list[int] | None:
    """Return the values of a mask in ascending order; None for shapes and unreadable files."""
    if holds_shapes(path):
        return None
    try:
        return distinct_codes(_codes(path, shape, None, Frame())[0]).tolist()
    except VispeError:
        return None


def _codes(
    path: Path, shape: tuple[int, int, int] | None, page: int | None, frame: Frame
) -> tuple[np.ndarray, int]:
    """Return the values (z, h, w) of a mask, -1 where transparent, and its orientation tag.

    Raises:
        InputError: unreadable, lossy or coloured.
    """
    decoded = (
        decoded_labels(path) if shape is None else decoded_labels(path, shape[1:]).as_pages(shape[0], page)
    )
    codes, is_colour, unlabelled = label_codes(path, in_page_order(path, decoded, frame), by_index=True)
    if is_colour:
        raise InputError(f"{path}: ground-truth masks must have one channel of class numbers, got colours.")
    return np.where(unlabelled, -1, codes), decoded.orientation
