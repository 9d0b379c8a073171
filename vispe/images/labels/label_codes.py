"""Label images as integer codes: grey levels, or packed colours."""

from pathlib import Path

import numpy as np

from vispe.errors import InputError
from vispe.images.formats.decode import decode
from vispe.images.formats.decoded_image import Decoded
from vispe.images.labels.class_names import Level


def unpacked_levels(codes: np.ndarray, is_colour: bool, deep: bool) -> list[Level]:
    """Convert codes of `label_codes` to levels; `deep` if colours have 16 bits per channel."""
    if not is_colour:
        return [(code,) for code in map(int, codes)]
    unit = 257 if deep else 1
    channels = [(code >> 32, code >> 16 & 65535, code & 65535) for code in map(int, codes)]
    return [tuple(round(value / unit) for value in level) for level in channels]


def distinct_codes(codes: np.ndarray) -> np.ndarray:
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
