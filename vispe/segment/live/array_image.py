"""Images from arrays, as in napari."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from vispe.errors import InputError, ShapeError
from vispe.images.read import Micrograph


def micrograph(array: np.ndarray, axes: str | None = None, name: str = "image") -> Micrograph:
    """Create an image from an array.

    Args:
        array: grey levels of any real number type; bool becomes 0 and 255.
        axes: a letter for each dimension: Y and X, C for channels, all others are pages. None: 'YX' for two
            dimensions.
        name: name in messages.

    Raises:
        ShapeError: axes that do not match the array, or an array without pixels.
        InputError: a non-numeric array, or one without data.
    """
    array = np.asarray(array)
    axes = "YX" if axes is None else axes.upper()
    if (
        len(axes) != array.ndim
        or len(set(axes)) != len(axes)
        or not {"Y", "X"} <= set(axes)
        or not array.size
    ):
        raise ShapeError(
            f"axes={axes} must have one letter per dimension, with Y and X, for an array of shape {array.shape}."
        )
    if array.dtype.kind not in "buif":
        raise InputError(f"{name} has dtype {array.dtype} instead of grey levels. Convert it to numbers.")
    if array.dtype.kind == "b":
        array = array.astype(np.uint8) * np.uint8(255)
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    order = [axes.index(a) for a in axes if a not in "YXC"] + [axes.index(a) for a in "YXC" if a in axes]
    pages = array.transpose(order)
    pages = pages if "C" in axes else pages[..., None]
    image = Micrograph(Path(name), np.ascontiguousarray(pages.reshape(-1, *pages.shape[-3:])))
    if not image.valid.any():
        raise InputError(f"{name} has no data: all pixels are NaN or infinite.")
    return image
