"""Decoder of NumPy files, which have no metadata about their axes."""

from pathlib import Path

import numpy as np

from vispe.errors import InputError
from vispe.images.formats.decoded_image import BROKEN, Decoded, count_axes, damaged, times, to_pages


def decode_npy(path: Path, axes: str | None, size: tuple[int, int] | None = None) -> Decoded:
    """Read an array written by `numpy.save`; object arrays, which can run code, are rejected.

    Args:
        path: the file.
        axes: axis of each dimension; None is YX for two dimensions.
        size: expected height and width, from which the axes of three dimensions are inferred.

    Raises:
        InputError: damaged, object dtype, or three or more dimensions with unknown axes.
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
            f"{path}: the axes of the array are unknown, got the shape {times(array.shape) or '()'}. Set `axes`, such "
            "as ZYX (pages) or YXC (channels), or save it as TIFF."
        )
    return Decoded(
        pages=to_pages(path, array, letters, axes),
        format="NPY",
        page_axes=count_axes(letters, axes, array.shape),
    )
