"""Sample region of an image: crop, mask file, and transparency.

Pixels outside of the sample are treated like pixels without data: they are excluded from fractions, objects and
measurements, and are 0 in label maps.
"""

import re
from pathlib import Path

import numpy as np

from vispe.errors import OptionError
from vispe.images.formats.decoded_image import Decoded
from vispe.images.labels.label_codes import decoded_labels
from vispe.images.labels.label_pages import check_pages, in_page_order
from vispe.images.orientation import Frame

_RANGE = re.compile(r"\s*(-?\d+)?\s*:\s*(-?\d+)?\s*")


def parse_crop(crop: str, size: tuple[int, int] | None = None) -> tuple[slice, slice]:
    """Return the rows and columns of a crop such as '0:884,0:1024' as slices.

    Args:
        crop: 'rows,columns', each 'start:stop' with the stop excluded; either bound may be omitted, and negative
            numbers count from the end, as in ':-64,:'.
        size: height and width of the image; None checks the syntax only.

    Raises:
        OptionError: invalid syntax, or rows or columns outside of the image.
    """
    parts = [_RANGE.fullmatch(part) for part in str(crop).split(",")]
    if len(parts) != 2 or None in parts:
        raise OptionError(
            f"crop must be two ranges of pixels, rows and columns, such as 0:884,0:1024 or :-64,:, got {crop!r}."
        )
    slices = []
    for part, name, length in zip(parts, ("rows", "columns"), size or (None, None), strict=True):
        start, stop = (None if bound is None else int(bound) for bound in part.groups())
        if length is not None:
            bounds = (0 if start is None else start, length if stop is None else stop)
            first, last = (bound + length if bound < 0 else bound for bound in bounds)
            if not 0 <= first < last <= length:
                raise OptionError(
                    f"crop: {name} must be a range within 0:{length}, the size of the image, got {part[0].strip()} in "
                    f"{crop!r}."
                )
            start, stop = first, last
        slices.append(slice(start, stop))
    return slices[0], slices[1]


def read_mask(path: Path, shape: tuple[int, int, int], frame: Frame) -> tuple[np.ndarray, list[str]]:
    """Read a mask of the sample -> (z or 1, h, w) bool, True where any channel is not 0; and notes.

    Args:
        path: PNG, TIFF, BMP or NPY without lossy compression.
        shape: (z, h, w) of the image; the mask has one page, or as many as the image.
        frame: frame of the image.

    Raises:
        InputError: unreadable, lossy, or a different size.
    """
    decoded = in_page_order(path, decoded_labels(path, shape[1:]).as_pages(shape[0]), frame)
    pages, transparent_pixels = decoded.pages, transparent(decoded)
    if decoded.alpha:
        pages = pages[..., :-1]
    if decoded.palette is not None:
        pages = decoded.palette[pages[..., 0]]
    inside = (np.nan_to_num(pages) if pages.dtype.kind == "f" else pages).any(-1)
    inside = inside if transparent_pixels is None else inside & ~transparent_pixels
    inside, notes = frame.fitted(path, inside, decoded.orientation, shape[1:])
    check_pages(path, inside.shape, shape, 0 if len(inside) == 1 else None, "mask", frame.hint())
    return inside, notes


def transparent(decoded: Decoded) -> np.ndarray | None:
    """Return the fully transparent pixels (z, h, w) of a file, None if it has no transparency."""
    if decoded.palette is not None:
        return np.isin(decoded.pages[..., 0], decoded.transparent) if decoded.transparent else None
    return decoded.pages[..., -1] == 0 if decoded.alpha else None
