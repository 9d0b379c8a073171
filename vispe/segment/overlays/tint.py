"""Images tinted by the classes of their pixels, with class boundaries."""

from collections.abc import Iterator, Sequence

import numpy as np

from vispe.segment.features.threads import in_order

Color = tuple[int, int, int]
PALETTE: tuple[Color, ...] = tuple(
    (code >> 16, code >> 8 & 255, code & 255)
    for code in (
        *(0x0072B2, 0xE69F00, 0x009E73, 0xD55E00, 0x56B4E9, 0xCC79A7, 0xF0E442),
        *(0x550022, 0x001199, 0x99FFEE, 0x115555, 0x554400, 0xEEBBAA, 0xAA4444),
        *(0x7777FF, 0x550055, 0x5500FF, 0xBBDDFF, 0x885577, 0xBBFFAA),
    )
)
"""Twenty colours for classes 1, 2, ...

The first seven are those of Okabe and Ito, sorted by contrast; the others were chosen one by one to maximise the
smallest CIEDE2000 distance to all earlier ones, for normal vision and the three types of colour blindness.
"""

_BAND = 1 << 19  # pixels per band


def boundaries(labels: np.ndarray, width: int = 1) -> np.ndarray:
    """Return the mask (h, w) of pixels of the higher class within `width` pixels of a class boundary."""
    low = np.zeros(labels.shape, bool)
    for axis in (0, 1):
        values = labels.swapaxes(0, axis)
        mark = low.swapaxes(0, axis)
        both_classes = (values[1:] > 0) & (values[:-1] > 0)
        mark[1:] |= both_classes & (values[1:] > values[:-1])
        mark[:-1] |= both_classes & (values[:-1] > values[1:])
    if width > 1:
        # maximum over a square, separable: shifted maxima are faster than a SciPy filter
        dilated = np.where(low, labels, 0)
        for axis in (0, 1):
            near = dilated.swapaxes(0, axis).copy()
            far = dilated.swapaxes(0, axis)
            for step in range(1, min(width, len(near))):
                np.maximum(far[step:], near[:-step], out=far[step:])
                np.maximum(far[:-step], near[step:], out=far[:-step])
        low = (dilated == labels) & (labels > 0) & (dilated > 0)
    return low


def to_rgb(image: np.ndarray, factor: int) -> np.ndarray:
    """Convert an image (h, w, c) in [0, 1] to RGB (factor * h, factor * w, 3) uint8, as in `overlay`."""
    return _grey_or_rgb(image).repeat(factor, 0).repeat(factor, 1)


def _grey_or_rgb(image: np.ndarray) -> np.ndarray:
    """Return an image (h, w) or (h, w, c) in [0, 1] as RGB (h, w, 3) uint8."""
    if image.ndim == 2:
        image = image[..., None]
    if image.shape[2] > 3:
        image = image.mean(2, keepdims=True)
    elif image.shape[2] == 2:
        image = image[..., :1]
    grey = np.rint(np.clip(np.nan_to_num(image), 0, 1) * 255).astype(np.uint8)
    return np.repeat(grey, 3, axis=2) if grey.shape[2] == 1 else grey


def blended(
    image: np.ndarray, labels: np.ndarray, colors: Sequence[Color], alpha: float, factor: int
) -> Iterator[tuple[int, np.ndarray]]:
    """Tint an image by its classes and mark their borders; yield bands (rows, w, 3) with the first row of each."""
    height, width = labels.shape
    # border width grows with the figure: about 1 px per 1500 px
    pen = max(2 if factor > 2 else 1, round(factor * max(height, width) / 1500))
    # premultiplied colours: one table look-up and one multiplication per pixel and channel
    table = np.array([(0, 0, 0), *colors], np.uint16)
    # opacity in 1/256: first half for class areas, second half (opaque) for borders
    opacity = np.full(2 * len(table), 256, np.uint16)
    opacity[1 : len(table)] = round(alpha * 256)
    opacity[0] = 0
    added = np.concatenate([table, table]) * opacity[:, None] + 128
    rows, margin = max(_BAND // width, 1), -(-pen // factor)

    def band(number: int) -> np.ndarray:
        # a margin around the band, so that borders are as thick at its edges as elsewhere
        top = number * rows
        bottom, first = min(top + rows, height), max(top - margin, 0)
        padded = labels[first : bottom + margin].astype(np.uint16).repeat(factor, 0).repeat(factor, 1)
        inside = slice((top - first) * factor, (bottom - first) * factor)
        codes = padded[inside]
        # border pixels use the second, opaque half of the tables
        codes[boundaries(padded, pen)[inside]] += len(table)
        shown = _grey_or_rgb(image[top:bottom]).repeat(factor, 0).repeat(factor, 1)
        background, out = (256 - opacity)[codes], np.empty_like(shown)
        for channel in range(3):
            tinted = shown[..., channel] * background
            tinted += added[:, channel][codes]
            out[..., channel] = tinted >> 8
        return out

    # bands bound the memory of large images
    for number, rows_of_band in enumerate(in_order(band, -(-height // rows), 2)):
        yield number * rows * factor, rows_of_band
