"""NumPy files, which say nothing about what their dimensions are."""

from pathlib import Path

import numpy as np

from vispe.errors import InputError
from vispe.images.formats.decoded_image import BROKEN, Decoded, count_axes, damaged, times, to_pages


def decode_npy(path: Path, axes: str | None, size: tuple[int, int] | None = None) -> Decoded:
    """Read an array that `numpy.save` wrote; objects, which may run code, are refused.

    Args:
        path: the file.
        axes: the meaning of each dimension; for two dimensions YX where it is None.
        size: the height and width that are expected, by which three dimensions are known apart from each other.

    Raises:
        InputError: damaged, objects, or three dimensions and more whose meaning nobody says.
    """
    try:
        array = np.load(path, allow_pickle=False)
    except BROKEN as error:
        raise damaged(path, error) from error
    letters = "YX" if array.ndim == 2 else axes.upper() if axes else ""
    if array.ndim == 3 and size is not None and not letters:
        letters = "ZYX" if array.shape[1:] == size else "YXS" if array.shape[:2] == size else ""
    if not letters:
        raise InputError(
            f"{path} holds an array of {times(array.shape) or 'one number'} and does not say what its dimensions are; "
            "say it with axes, such as ZYX (pages) or YXC (channels), or save it as TIFF."
        )
    return Decoded(
        pages=to_pages(path, array, letters, axes),
        format="NPY",
        page_axes=count_axes(letters, axes, array.shape),
    )
