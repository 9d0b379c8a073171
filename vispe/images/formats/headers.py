"""Size, orientation and planes of an image from its header, for checks before a run."""

from pathlib import Path

import numpy as np
from PIL import Image

from vispe.errors import InputError
from vispe.images.formats.decoded_image import (
    BROKEN,
    PILLOW_FORMATS,
    TIFF_MAGIC,
    PageAxes,
    checked_axes,
    count_axes,
    largest_frame,
    no_size_limit,
)
from vispe.images.formats.metadata import png_metadata_after_pixels
from vispe.images.formats.size_limits import check_size
from vispe.images.orientation import Frame, Orientation, known_tag, oriented_size
from vispe.images.read import pick_pages


def stored_shape(
    path: Path, z: int | str | None = None, axes: str | None = None, orientation: Orientation = "tag"
) -> tuple[int, int, int] | None:
    """Return (pages, height, width) of the result of `read_image` without decoding pixels.

    Args:
        path: an image file.
        z: pages to read, as in `read_image`.
        axes: axes of the stored array, as in `read_image`.
        orientation: see `read_image`.

    Returns:
        None if the header cannot be read; `read_image` raises the error.
    """
    try:
        with path.open("rb") as stream:
            magic = stream.read(4)
        (page_axes, *size), tag = _tiff(path, axes) if magic in TIFF_MAGIC else _plain(path, axes)
        height, width = oriented_size(tuple(size), tag) if orientation == "tag" else size
        return len(_pages(path, page_axes, z)), height, width
    except (InputError, *BROKEN):
        return None


def stored_frame(
    path: Path, z: int | str | None = None, axes: str | None = None, orientation: Orientation = "tag"
) -> Frame:
    """Return the frame of the result of `read_image` without decoding pixels; arguments as in `stored_shape`."""
    try:
        with path.open("rb") as stream:
            magic = stream.read(4)
        (page_axes, *_), tag = _tiff(path, axes) if magic in TIFF_MAGIC else _plain(path, axes)
        return Frame(tag, orientation == "tag").with_pages(page_axes, _pages(path, page_axes, z))
    except (InputError, *BROKEN):
        return Frame(1, orientation == "tag")


def _pages(path: Path, axes: PageAxes, z: int | str | None) -> np.ndarray:
    """Return the numbers of the selected pages."""
    return pick_pages(path, np.arange(np.prod([n for _, n in axes], dtype=np.int64)), z)


def stored_planes(path: Path) -> int:
    """Return the number of separately stored colour planes of a TIFF file (see `Decoded.planes`), otherwise 0."""
    try:
        with path.open("rb") as stream:
            if stream.read(4) not in TIFF_MAGIC:
                return 0
        from vispe.images.formats.tiff_metadata import checked_tiff, largest_series, separate_colours

        with checked_tiff(path) as tif:
            series = tif.series[largest_series(tif.series)]
            return separate_colours(tif, series) if series.axes == "SYX" else 0
    except (InputError, *BROKEN):
        return 0


def _plain(path: Path, axes: str | None) -> tuple[tuple[PageAxes, int, int], int]:
    with no_size_limit(), Image.open(path, formats=PILLOW_FORMATS) as image:
        largest_frame(image)
        width, height = image.size
        tag = known_tag(_exif(path, image).get(274, 1))
        bands = () if image.mode in ("1", "L", "P", "I", "I;16") else (len(image.getbands()),)
    return _sizes(path, (height, width, *bands), "YXS"[: 2 + len(bands)], axes), tag


def _exif(path: Path, image: Image.Image) -> Image.Exif:
    """Return the EXIF data; of PNG files without decoding the pixels unless metadata follow them."""
    if image.format != "PNG":
        return image.getexif()
    if not png_metadata_after_pixels(path):
        return Image.Image.getexif(image)
    check_size(path, (image.height, image.width, len(image.getbands())), 8)
    return image.getexif()


def _tiff(path: Path, axes: str | None) -> tuple[tuple[PageAxes, int, int], int]:
    from vispe.images.formats.tiff_metadata import checked_tiff, largest_series, tag_value

    with checked_tiff(path) as tif:
        series = tif.series[largest_series(tif.series)]
        tag = known_tag(tag_value(series.keyframe, "Orientation", 1))
        return _sizes(path, series.shape, series.axes, axes), tag


def _sizes(
    path: Path, shape: tuple[int, ...], letters: str, requested: str | None
) -> tuple[PageAxes, int, int]:
    """Return page axes, height and width of an array with these axes, or with the axes `requested` by the user."""
    letters = letters if requested is None else checked_axes(path, requested, shape)
    sizes = dict(zip(letters, shape, strict=True))
    return count_axes(letters, None, shape), sizes["Y"], sizes["X"]
