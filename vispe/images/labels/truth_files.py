"""Ground-truth masks from image files."""

from collections.abc import Callable, Mapping, Sequence
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
    levels = distinct_codes(codes)
    levels = levels[levels >= first]
    limit = (n_classes or 255) - 1 + first
    other_levels = [(int(v),) for v in levels[:-1]]
    # not every image shows every class
    numbers = counts_up(other_levels) or (
        n_classes is not None and len(other_levels) > 1 and levels[-1] > limit
    )
    void: dict[int, int] = {}
    if numbers and other_levels[-1][0] <= limit and void_level([(int(levels[-1]),)]):
        percentage = 100 * float((codes == levels[-1]).mean())
        notes.append(
            f"{path}: {levels[-1]} ({percentage:.3g} % of the pixels) is not a class and is ignored in the score."
        )
        codes = np.where(codes == levels[-1], -1, codes)
        void, levels = {int(levels[-1]): 0}, levels[:-1]
    if first == 0 and n_classes and levels.size and levels[0] > 0 and levels[-1] <= limit:
        values = describe([(int(v),) for v in levels])
        notes.append(
            f"{path}: no pixel is 0, and the values ({values}) are read as class numbers from 0. If 1 is the first "
            "class, set `zero_is=ignore`."
        )
    for text in notes:
        if note is not None:
            note(text)
    ranked = bool(levels.size and levels[-1] > limit)
    if ranked and (n_classes is None or levels.size != n_classes):
        count = f"n_classes={n_classes}" if n_classes else "at most 255 classes"
        raise InputError(
            f"{path}: values must be {first} to {limit} with {count} and zero_is={zero_is}, got "
            f"{describe([(int(v),) for v in levels])}. Renumber the mask."
        )
    if on_values is not None:
        classes = range(1, len(levels) + 1) if ranked else (levels + 1 - first).tolist()
        on_values(dict(zip(levels.tolist(), classes, strict=True)) | void)
    out = np.searchsorted(levels, codes) + 1 if ranked else codes + 1 - first
    return np.where(codes < first, 0, out).astype(np.int32)


def masks_from_one(
    shapes: Mapping[Path, tuple[int, int, int] | None], n_classes: int
) -> tuple[set[Path], dict[Path, str]]:
    """Return the masks whose classes count from 1, because a mask among them has exactly the values 1..K.

    Such a mask may lack the last class, so that its values are also class numbers from 0.

    Args:
        shapes: (z, h, w) of the image of each mask, None if unknown.
        n_classes: K.

    Returns:
        The masks to read with `zero_is='ignore'`, and for each mask with the value 0 the reason why it cannot be read.
    """
    if len(shapes) < 2:
        return set(), {}
    firsts = {path: _first_number(path, shape, n_classes) for path, shape in shapes.items()}
    one = next((path for path, first in firsts.items() if first == 1), None)
    if one is None:
        return set(), {}
    reason = (
        f"has the value 0, but {one.name} numbers the {n_classes} classes from 1. Set `zero_is=ignore` if 0 is "
        "unlabelled, or renumber the masks."
    )
    zeros = {path: f"{path} {reason}" for path, first in firsts.items() if first == 0}
    return firsts.keys() - zeros.keys(), zeros


def _first_number(path: Path, shape: tuple[int, int, int] | None, n_classes: int) -> int | None:
    """Return the number of the first class of a mask: 1 for exactly the values 1..K, 0 with the value 0.

    None for shapes, unreadable files, and masks without 0 and without one of the classes.
    """
    if holds_shapes(path):
        return None
    try:
        levels = distinct_codes(_codes(path, shape, None, Frame())[0]).tolist()
    except VispeError:
        return None
    return 0 if 0 in levels else 1 if levels == list(range(1, n_classes + 1)) else None


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
