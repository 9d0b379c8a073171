"""Files to arrays: every pixel as stored, in one layout, with what the file says about itself.

`decode` reads TIFF with tifffile and PNG, JPEG, BMP, GIF and WebP with Pillow, and never loses depth: 16-bit colour
PNG, which Pillow cuts to 8 bits, is decoded by imagecodecs.  Palettes, alpha and inverted greys are left as they
are stored and only described, because images and labels treat them differently (`read.py`, `labels/read.py`).
"""

import struct
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image

from vispe.errors import InputError
from vispe.images.orientation import oriented, oriented_size

SUFFIXES = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp", ".webp")
"""File name endings that are looked for in folders; a file named outright is judged by its content."""

GIGAPIXEL = 1_000_000_000
"""Above this many pixels a note says that the image is very large."""

PRINT_PIXEL = 5.0
"""Resolution tags that make a pixel this many microns or larger are meant for printers (72 to 2400 dpi)."""

PICTURES = ("PNG", "JPEG", "BMP", "GIF", "WEBP")
"""Formats that Pillow reads here."""

TIFF_MAGIC = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
BROKEN = (
    *(ValueError, TypeError, KeyError, IndexError, AttributeError, ArithmeticError, RuntimeError),
    *(OSError, EOFError, SyntaxError, MemoryError, AssertionError, struct.error, zlib.error),
)
"""What decoders raise on damaged files; MemoryError when a damaged header asks for an absurd size."""

Resolution = tuple[float, float, str]
"""Pixels per unit along x and y, and the unit: 'none', 'inch' or 'cm'."""

PageAxes = tuple[tuple[str, int], ...]
"""The axes that count pages, slowest first, with their lengths, such as (('T', 2), ('Z', 5)); none for one page."""


@dataclass(frozen=True, eq=False)
class Decoded:
    """A file as stored, in the layout (z, h, w, c).

    Attributes:
        pages: (z, h, w, c) array of the file's own type in native byte order; bool for 1-bit files.
        format: 'PNG', 'JPEG', 'BMP', 'GIF', 'WEBP', 'TIFF', 'NPY' or the name of one of `vendors.VENDORS`.
        palette: (n, 3) uint8 or uint16 colours when the values are palette indices, else None.
        transparent: palette indices that are fully transparent.
        alpha: whether the last channel is an alpha channel.
        min_is_white: bits per sample when stored values count from white to black, else 0.
        step: what values were multiplied by on reading, as is usual for 2-bit (85) and 4-bit (17) greys in
            PNG.
        lossy: whether the compression changed values.
        pixel_size: microns per pixel (y, x), or None.
        resolution: the file's resolution tags, or None.
        channel_names: names of the channels where the file gives them.
        notes: what was noticed, one sentence each.
        page_axes: the axes that count pages.
        z_step: microns from one page to the next along Z, or None.
        orientation: the orientation tag, 1 to 8, which is not applied to `pages`.
        frame_interval: seconds from one page to the next along T, or None.
        planes: number of colours, 3 or 4, that are stored plane by plane and may be slices of a stack; 0 for none.
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

    def as_pages(self, count: int, page: int | None = None) -> "Decoded":
        """Return colour planes as pages, where an image has `count` of them and no page was named for the file."""
        if page is not None or not self.planes or self.planes != count or len(self.pages) != 1:
            return self
        notes = tuple(note for note in self.notes if "colour image" not in note)
        pages = self.pages[0].transpose(2, 0, 1)[..., None]
        return replace(self, pages=pages, alpha=False, planes=0, notes=notes)


def to_pages(path: Path, array: np.ndarray, axes: str, asked: str | None) -> np.ndarray:
    """Bring an array to (z, h, w, c) in native byte order.

    C and S become channels, Y and X the picture, and every other letter (Z, T, I, Q, ...) pages, in stored
    order.
    """
    if asked is not None:
        axes = checked_axes(path, asked, array.shape)
    check_pixels(path, array.shape)
    pages = [i for i, letter in enumerate(axes) if letter not in "YXCS"]
    rest = [axes.index(letter) for letter in "YXCS" if letter in axes]
    array = array.transpose(pages + rest)
    h, w = array.shape[len(pages) : len(pages) + 2]
    n = int(np.prod(array.shape[: len(pages)], dtype=np.int64))
    array = array.reshape(n, h, w, -1)
    if array.dtype.kind not in "buif":
        raise InputError(f"{path} holds {array.dtype} values; export real numbers, such as the magnitude.")
    return np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="), copy=False))


def count_axes(axes: str, asked: str | None, shape: tuple[int, ...]) -> PageAxes:
    """Give the axes that count pages, of an array with `axes`, or with those that the user `asked` for."""
    letters = axes if asked is None else asked.upper()
    return tuple((a, n) for a, n in zip(letters, shape, strict=True) if a not in "YXCS" and n > 1)


def physical(resolution: Resolution | None) -> tuple[float, float] | None:
    """Microns per pixel (y, x) by resolution tags; None without a unit or when meant for printing."""
    if resolution is None or resolution[2] not in ("inch", "cm"):
        return None
    x, y, unit = resolution
    if x <= 0 or y <= 0:
        return None
    micron = 25_400.0 if unit == "inch" else 10_000.0
    size = (micron / y, micron / x)
    return size if max(size) < PRINT_PIXEL else None


def checked_axes(path: Path, axes: str, shape: tuple[int, ...]) -> str:
    """Return axes in capitals, or say why they do not fit an array of this shape."""
    axes = axes.upper()
    legal = set(axes) <= set("TZCYXSIQ") and len(set(axes)) == len(axes) and {"Y", "X"} <= set(axes)
    if not legal:
        raise InputError(
            f"axes={axes!r} cannot describe an image; give each of Y and X once and any of T, Z, C, S, such as 'ZYX'."
        )
    if len(axes) != len(shape):
        raise InputError(
            f"axes={axes!r} names {len(axes)} dimensions, but {path} holds {len(shape)}: {times(shape)}."
        )
    return axes


def largest_frame(image: Image.Image) -> int:
    """Go to the frame with the most pixels of a file of several images (MPO), and return its number."""
    count = getattr(image, "n_frames", 1) if image.format == "MPO" else 1
    sizes = []
    for number in range(count):
        try:
            image.seek(number)
            sizes.append(image.width * image.height)
        except BROKEN:  # of the other images; the first is open already
            sizes.append(0)
    number = sizes.index(max(sizes))
    if count > 1:
        image.seek(number)
    return number


@contextmanager
def no_size_limit() -> Iterator[None]:
    """Lift Pillow's limit on image size: large mosaics are normal here, and the user named the file."""
    limit = Image.MAX_IMAGE_PIXELS
    Image.MAX_IMAGE_PIXELS = None
    try:
        yield
    finally:
        Image.MAX_IMAGE_PIXELS = limit


def reason_of(error: BaseException) -> str:
    """Return what a decoder said about damage; in words where it said no more than the value that it stumbled over."""
    text = " ".join(str(error).split()).rstrip(".")
    if len(text.split()) > 1:
        return text
    value = f", {text.strip(chr(39))}," if text and isinstance(error, KeyError) else ""
    return f"an entry of its header{value} is missing or impossible"


def damaged(path: Path, error: BaseException) -> InputError:
    """Return what to raise for what a decoder says about damage."""
    return InputError(f"{path} is truncated or damaged ({reason_of(error)}); copy or export it again.")


def check_pixels(path: Path, shape: tuple[int, ...]) -> None:
    """Raise InputError for an array without pixels."""
    if 0 in shape:
        raise InputError(f"{path} has no pixels (its array is {times(shape)}); export the image again.")


def times(shape: Iterable[int]) -> str:
    """Write a shape for a message, such as '3 x 40 x 50'."""
    return " x ".join(map(str, shape))
