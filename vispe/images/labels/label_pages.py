"""Sizes and pages of label files, which must match those of their image."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from vispe.errors import InputError, OptionError, counted
from vispe.images.formats.decoded_image import Decoded
from vispe.images.orientation import Frame, planes_of


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


def in_all_pages(
    path: Path, codes: np.ndarray, shape: tuple[int, int, int], page: int | None, what: str, hint: str
) -> np.ndarray:
    """Return the codes (z, h, w) of a label file on all pages of the image, -1 on pages without labels.

    The arguments are those of `check_pages`.

    Raises:
        InputError: different size or number of pages, or a page that does not exist.
        OptionError: `page` is set for a file of several pages.
    """
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
