"""Which pixels of an image show the sample: a crop, a mask file, and transparency.

The other pixels are treated like pixels without data: they count in no fraction, object or measurement, and are 0 in
label maps.
"""

import re
from pathlib import Path

import numpy as np

from vispe.errors import OptionError
from vispe.images.formats.decoded_image import Decoded
from vispe.images.labels.label_files import check_pages, decoded_labels
from vispe.images.orientation import Frame

_RANGE = re.compile(r"\s*(-?\d+)?\s*:\s*(-?\d+)?\s*")


def parse_crop(crop: str, size: tuple[int, int] | None = None) -> tuple[slice, slice]:
    """Return the rows and columns of a crop such as '0:884,0:1024', as slices of NumPy.

    Args:
        crop: 'rows,columns', each 'start:stop' with the stop excluded; either side may be missing, and negative
            numbers count from the end, as in ':-64,:'.
        size: height and width of the image, for the check; None checks the text alone.

    Raises:
        OptionError: not such a text, or rows or columns that the image does not have.
    """
    parts = [_RANGE.fullmatch(part) for part in str(crop).split(",")]
    if len(parts) != 2 or None in parts:
        raise OptionError(
            f"crop={crop!r} must be two ranges of pixels, rows and columns, such as 0:884,0:1024 or :-64,:."
        )
    found = []
    for part, name, length in zip(parts, ("rows", "columns"), size or (None, None), strict=True):
        start, stop = (None if end is None else int(end) for end in part.groups())
        if length is not None:
            ends = (0 if start is None else start, length if stop is None else stop)
            first, last = (end + length if end < 0 else end for end in ends)
            if not 0 <= first < last <= length:
                raise OptionError(
                    f"crop={crop!r} asks for {name} {part[0].strip()} of an image that has {length}; choose a range "
                    f"within 0:{length}."
                )
            start, stop = first, last
        found.append(slice(start, stop))
    return found[0], found[1]


def read_mask(path: Path, shape: tuple[int, int, int], frame: Frame) -> tuple[np.ndarray, list[str]]:
    """Read a mask of the sample -> (z or 1, h, w) bool, True where any channel is not 0; and notes.

    Args:
        path: PNG, TIFF, BMP or NPY without lossy compression.
        shape: (z, h, w) of the image; the mask has one page for all, or as many as the image.
        frame: of the image.

    Raises:
        InputError: as for labels: unreadable, lossy, or of another size.
    """
    found = decoded_labels(path, shape[1:]).as_pages(shape[0])
    pages, clear = found.pages, transparent(found)
    if found.alpha:
        pages = pages[..., :-1]
    if found.palette is not None:
        pages = found.palette[pages[..., 0]]
    inside = (np.nan_to_num(pages) if pages.dtype.kind == "f" else pages).any(-1)
    inside = inside if clear is None else inside & ~clear
    inside, notes = frame.fitted(path, inside, found.orientation, shape[1:])
    check_pages(path, inside.shape, shape, 0 if len(inside) == 1 else None, "mask", frame.hint())
    return inside, notes


def transparent(found: Decoded) -> np.ndarray | None:
    """Return the fully transparent pixels (z, h, w) of a file, None where it has no transparency."""
    if found.palette is not None:
        return np.isin(found.pages[..., 0], found.transparent) if found.transparent else None
    return found.pages[..., -1] == 0 if found.alpha else None
