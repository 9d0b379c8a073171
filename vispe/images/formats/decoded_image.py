"""Decoded image files: pixels as stored in one layout, with metadata.

`decode` reads TIFF with tifffile and PNG, JPEG, BMP, GIF and WebP with Pillow at full bit depth: 16-bit colour PNG,
which Pillow truncates to 8 bits, is decoded by imagecodecs. Palettes, alpha channels and inverted grey levels
are recorded but not applied, because images and labels treat them differently (`vispe.images.read`,
`vispe.images.labels.label_files`).
"""

import struct
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image

from vispe.errors import InputError, counted, short
from vispe.images.formats.units import lost_pixel_size, size_sources
from vispe.images.orientation import oriented, oriented_size

SUFFIXES = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp", ".webp")
"""File suffixes that are searched for in folders; the format of files named individually is detected from contents."""

GIGAPIXEL = 1_000_000_000
"""Number of pixels above which a note about the size is written."""

PRINT_PIXEL = 5.0
"""Pixel size in microns from which resolution tags are interpreted as printing resolution (72 to 2400 dpi)."""

PILLOW_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP")
"""Formats that are read by Pillow."""

TIFF_MAGIC = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
BROKEN = (
    *(ValueError, TypeError, KeyError, IndexError, AttributeError, ArithmeticError, RuntimeError),
    *(OSError, EOFError, SyntaxError, MemoryError, AssertionError, struct.error, zlib.error),
)
"""Exceptions of decoders on damaged files; MemoryError if a damaged header declares an absurd size."""

Resolution = tuple[float, float, str]
"""Pixels per unit along x and y, and the unit: 'none', 'inch' or 'cm'."""

PageAxes = tuple[tuple[str, int], ...]
"""Page axes, slowest first, with their lengths, such as (('T', 2), ('Z', 5)); empty for one page."""


@dataclass(frozen=True, eq=False)
class Decoded:
    """Decoded file as stored, in the layout (z, h, w, c).

    Attributes:
        pages: (z, h, w, c) array in the dtype of the file, native byte order; bool for 1-bit files.
        format: 'PNG', 'JPEG', 'BMP', 'GIF', 'WEBP', 'TIFF', 'NPY', 'PFM' or the name of one of `vendors.VENDORS`.
        palette: colours (n, 3), uint8 or uint16, if the values are palette indices, otherwise None.
        transparent: palette indices that are fully transparent.
        alpha: whether the last channel is an alpha channel.
        min_is_white: bits per sample if 0 is white (MinIsWhite), otherwise 0.
        step: factor by which the decoder scaled the values, for 2-bit (85) and 4-bit (17) grey levels in PNG.
        lossy: whether the compression changed values.
        pixel_size: microns per pixel (y, x), or None.
        resolution: resolution tags of the file, or None.
        channel_names: names of the channels, or ().
        notes: notes for the user, one sentence each.
        page_axes: letters of the page axes, slowest first.
        z_step: microns between pages along Z, or None.
        orientation: orientation tag, 1 to 8, which is not applied to `pages`.
        frame_interval: seconds between pages along T, or None.
        planes: number of separately stored colour planes, 3 or 4, that may be slices of a stack; otherwise 0.
    """

    pages: np.ndarray
    format: str
    palette: np.ndarray | None = None
    transparent: tuple[int, ...] = ()
    alpha: bool = False
    min_is_white: int = 0
    step: int = 1
    lossy: bool = False
    pixel_size: tuple[float, float] | None = None
    resolution: Resolution | None = None
    channel_names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    page_axes: PageAxes = ()
    z_step: float | None = None
    orientation: int = 1
    frame_interval: float | None = None
    planes: int = 0

    def oriented(self) -> "Decoded":
        """Return the file with its orientation tag applied."""
        tag = self.orientation
        return replace(
            self,
            pages=np.ascontiguousarray(oriented(self.pages, tag)),
            pixel_size=oriented_size(self.pixel_size, tag),
            resolution=oriented_size(self.resolution, tag),
            orientation=1,
        )

    def with_axes(self, letters: str, axes: str | None) -> "Decoded":
        """Return the file with the sizes of its stored dimensions if the user names them `axes`."""
        sources = size_sources(letters, axes)
        if all(letter == source for letter, source in sources.items()):
            return self
        y, x = self.pixel_size or (None, None)
        sizes = {"Z": self.z_step, "Y": y, "X": x}
        y, x, z = (sizes.get(sources[letter]) for letter in "YXZ")
        notes = self.notes
        if self.pixel_size and not (y and x):
            notes += (lost_pixel_size(str(axes)),)
        right = self.resolution and {"Y": self.resolution[1], "X": self.resolution[0]}
        tags = right and (right.get(sources["X"]), right.get(sources["Y"]))
        return replace(
            self,
            pixel_size=(y, x) if y and x else None,
            z_step=z,
            resolution=(*tags, self.resolution[2]) if tags and all(tags) else None,
            notes=notes,
        )

    def as_pages(self, count: int, page: int | None = None) -> "Decoded":
        """Return the file with colour planes as pages if the image has `count` pages and no page is selected."""
        if page is not None or not self.planes or self.planes != count or len(self.pages) != 1:
            return self
        notes = tuple(note for note in self.notes if "colour image" not in note)
        pages = self.pages[0].transpose(2, 0, 1)[..., None]
        return replace(self, pages=pages, alpha=False, planes=0, notes=notes)


def to_pages(path: Path, array: np.ndarray, axes: str, requested: str | None) -> np.ndarray:
    """Transpose and reshape an array to (z, h, w, c) in native byte order.

    C and S become channels, and every letter other than Y and X (Z, T, I, Q, ...) pages, in stored order.

    Raises:
        InputError: `requested` does not match the array, the array has no pixels, or its values are not real
            numbers.
    """
    if requested is not None:
        axes = checked_axes(path, requested, array.shape)
    check_pixels(path, array.shape)
    pages = [i for i, letter in enumerate(axes) if letter not in "YXCS"]
    rest = [axes.index(letter) for letter in "YXCS" if letter in axes]
    array = array.transpose(pages + rest)
    h, w = array.shape[len(pages) : len(pages) + 2]
    n = int(np.prod(array.shape[: len(pages)], dtype=np.int64))
    array = array.reshape(n, h, w, -1)
    if array.dtype.kind not in "buif":
        raise InputError(f"{path}: values must be real numbers, got {array.dtype}. Export the magnitude.")
    return np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="), copy=False))


def count_axes(axes: str, requested: str | None, shape: tuple[int, ...]) -> PageAxes:
    """Return the page axes of an array with `axes`, or with the axes `requested` by the user."""
    letters = axes if requested is None else requested.upper()
    return tuple((a, n) for a, n in zip(letters, shape, strict=True) if a not in "YXCS" and n > 1)


def physical(resolution: Resolution | None) -> tuple[float, float] | None:
    """Return microns per pixel (y, x) from resolution tags; None without a unit or for printing resolution."""
    if resolution is None or resolution[2] not in ("inch", "cm"):
        return None
    x, y, unit = resolution
    if x <= 0 or y <= 0:
        return None
    micron = 25_400.0 if unit == "inch" else 10_000.0
    size = (micron / y, micron / x)
    return size if max(size) < PRINT_PIXEL else None


def checked_axes(path: Path, axes: str, shape: tuple[int, ...]) -> str:
    """Return axes in capitals.

    Raises:
        InputError: invalid axes, or a different number of dimensions than `shape`.
    """
    axes = axes.upper()
    valid = set(axes) <= set("TZCYXSIQ") and len(set(axes)) == len(axes) and {"Y", "X"} <= set(axes)
    if not valid:
        raise InputError(
            f"axes must contain Y and X once and any of T, Z, C, S, such as 'ZYX', got {axes!r}."
        )
    if len(axes) != len(shape):
        raise InputError(
            f"{path}: axes must have {counted(len(shape), 'letter')} for the shape {times(shape)}, got {axes!r}."
        )
    return axes


def largest_frame(image: Image.Image) -> int:
    """Seek the frame with the most pixels of a multi-image file (MPO), and return its index."""
    count = getattr(image, "n_frames", 1) if image.format == "MPO" else 1
    sizes = []
    for number in range(count):
        try:
            image.seek(number)
            sizes.append(image.width * image.height)
        except BROKEN:  # a further image is damaged; the first image is already open
            sizes.append(0)
    number = sizes.index(max(sizes))
    if count > 1:
        image.seek(number)
    return number


@contextmanager
def no_size_limit() -> Iterator[None]:
    """Disable Pillow's limit on image size, since large mosaics are common; see `size_limits.check_size`."""
    limit = Image.MAX_IMAGE_PIXELS
    Image.MAX_IMAGE_PIXELS = None
    try:
        yield
    finally:
        Image.MAX_IMAGE_PIXELS = limit


def reason_of(error: BaseException) -> str:
    """Return the message of a decoder about damage; a generic one if the message is only a value."""
    text = short(error, limit=1000)
    if len(text.split()) > 1:
        return text
    value = f", {text.strip(chr(39))}," if text and isinstance(error, KeyError) else ""
    return f"a header entry{value} is missing or invalid"


def damaged(path: Path, error: BaseException) -> InputError:
    """Return the InputError for an exception of a decoder."""
    return InputError(f"{path} is truncated or damaged ({reason_of(error)}). Copy or export it again.")


def check_pixels(path: Path, shape: tuple[int, ...]) -> None:
    """Raise InputError for an array without pixels."""
    if 0 in shape:
        raise InputError(f"{path} has no pixels, got the shape {times(shape)}. Export the image again.")


def times(shape: Iterable[int]) -> str:
    """Format a shape for a message, such as '3 x 40 x 50'."""
    return " x ".join(map(str, shape))
