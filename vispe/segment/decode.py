"""Files to arrays: every pixel as stored, in one layout, with what the file says about itself.

`decode` reads TIFF with tifffile and PNG, JPEG and BMP with Pillow, and never loses depth: 16-bit colour PNG,
which Pillow cuts to 8 bits, is decoded in `png16.py`.  Palettes, alpha and inverted greys are left as they
are stored and only described, because images and labels treat them differently (`images.py`, `labels.py`).
"""

import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from vispe.errors import InputError, require
from vispe.segment.foreign import foreign_format
from vispe.segment.guards import LARGE, check_size, jpeg_damage, png_damage
from vispe.segment.paths import check_file
from vispe.segment.png16 import decode_png16

SUFFIXES = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp")
"""File name endings that are looked for in folders; a file named outright is judged by its content."""

GIGAPIXEL = 1_000_000_000
"""Above this many pixels a note says that the image is very large."""

PRINT_PIXEL = 5.0
"""Resolution tags that make a pixel this many microns or larger are meant for printers (72 to 2400 dpi)."""

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
    """A file as stored, in the layout (z, h, w, c), turned as its orientation tag says.

    Attributes:
        pages: (z, h, w, c) array of the file's own type in native byte order; bool for 1-bit files.
        format: 'PNG', 'JPEG', 'BMP' or 'TIFF'.
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


def decode(path: str | Path, *, axes: str | None = None, size: tuple[int, int] | None = None) -> Decoded:
    """Read one image file without changing any value.

    Args:
        path: a TIFF, PNG, JPEG or BMP file, judged by its content, not by its name.
        axes: the meaning of each dimension of the stored array, such as 'ZYX' or 'YXC'; None believes the
            file.
        size: the height and width that are expected, if any: a file of this size may compress better than a
            picture does; see `check_size`.

    Raises:
        InputError: no such file, not an image, truncated, no pixels, more than memory holds or than the file
            can, or `axes` does not fit; the file is named.
    """
    path = Path(path)
    check_file(path)
    try:
        with path.open("rb") as stream:
            magic = stream.read(26)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from error
    if not magic:
        raise InputError(f"{path} is empty (0 bytes); export the image again.")
    if magic[:4] in TIFF_MAGIC:
        require("tifffile", "cli", f"reading {path.name} (TIFF)")
        from vispe.segment.tiff import decode_tiff

        return decode_tiff(path, axes, size)
    return _decode_pillow(path, axes, magic, size)


def to_pages(path: Path, array: np.ndarray, axes: str, asked: str | None, orientation: int) -> np.ndarray:
    """Bring an array to (z, h, w, c) in native byte order and apply the orientation tag (EXIF values 1 to 8).

    C and S become channels, Y and X the picture, and every other letter (Z, T, I, Q, ...) pages, in stored
    order.
    """
    if asked is not None:
        axes = checked_axes(path, asked, array.shape)
    if 0 in array.shape:
        raise InputError(
            f"{path} has no pixels (its array is {_times(array.shape)}); export the image again."
        )
    pages = [i for i, letter in enumerate(axes) if letter not in "YXCS"]
    rest = [axes.index(letter) for letter in "YXCS" if letter in axes]
    array = array.transpose(pages + rest)
    h, w = array.shape[len(pages) : len(pages) + 2]
    n = int(np.prod(array.shape[: len(pages)], dtype=np.int64))
    array = array.reshape(n, h, w, -1)
    if array.dtype.kind not in "buif":
        raise InputError(f"{path} holds {array.dtype} values; export real numbers, such as the magnitude.")
    return np.ascontiguousarray(_orient(array, orientation).astype(array.dtype.newbyteorder("="), copy=False))


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


def swap_orientation(orientation: int, size: tuple | None) -> tuple | None:
    """Exchange the first two entries of a pixel size or resolution when the orientation exchanges x and y."""
    return (size[1], size[0], *size[2:]) if size is not None and orientation >= 5 else size


def _orient(pages: np.ndarray, orientation: int) -> np.ndarray:
    if orientation in (5, 6, 7, 8):
        pages = pages.swapaxes(1, 2)
    flips = {2: [2], 3: [1, 2], 4: [1], 6: [2], 7: [1, 2], 8: [1]}.get(orientation, [])
    return np.flip(pages, flips) if flips else pages


def checked_axes(path: Path, axes: str, shape: tuple[int, ...]) -> str:
    """Return axes in capitals, or say why they do not fit an array of this shape."""
    axes = axes.upper()
    legal = set(axes) <= set("TZCYXSIQ") and len(set(axes)) == len(axes) and {"Y", "X"} <= set(axes)
    if not legal:
        raise InputError(
            f"axes={axes!r} cannot describe an image; give each of Y and X once and any of T, Z, C, S, such "
            "as 'ZYX'."
        )
    if len(axes) != len(shape):
        raise InputError(
            f"axes={axes!r} names {len(axes)} dimensions, but {path} holds {len(shape)}: {_times(shape)}."
        )
    return axes


def _decode_pillow(path: Path, axes: str | None, magic: bytes, size: tuple[int, int] | None) -> Decoded:
    try:
        with (
            no_size_limit(),
            _warned(path) as notes,
            Image.open(path, formats=("PNG", "JPEG", "BMP")) as image,
        ):
            _check_claim(path, image, magic, size)
            if image.format == "PNG":
                notes += png_damage(path)
            image.load()
            if image.format not in ("PNG", "BMP"):
                notes += jpeg_damage(path)
            found = _from_pillow(path, image, axes, magic)
        return replace(found, notes=(*notes, *found.notes))
    except UnidentifiedImageError as error:
        found = foreign_format(path) or "convert it to one of these"
        raise InputError(f"{path} is not a readable PNG, JPEG, TIFF or BMP image; {found}.") from error
    except InputError:
        raise
    except BROKEN as error:
        raise InputError(
            f"{path} is truncated or damaged ({reason_of(error)}); copy or export it again."
        ) from error


def _check_claim(path: Path, image: Image.Image, magic: bytes, size: tuple[int, int] | None) -> None:
    w, h = image.size
    bits, samples = 8, len(image.getbands())
    if image.format == "PNG":
        bits, samples = magic[24], {2: 3, 4: 2, 6: 4}.get(magic[25], 1)
    # runs of equal pixels in a BMP file are decoded by Pillow one by one
    free = 1 << 24 if image.info.get("compression") in (1, 2) and image.format == "BMP" else LARGE
    check_size(path, (h, w, samples) if samples > 1 else (h, w), bits, free=free, trusted=size == (h, w))


@contextmanager
def _warned(path: Path) -> Iterator[list[str]]:
    """Collect what Pillow warns of, which is all that it says about some damage."""
    notes: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield notes
    notes += [f"{path.name}: {' '.join(str(w.message).split())}" for w in caught]


def _from_pillow(path: Path, image: Image.Image, axes: str | None, magic: bytes) -> Decoded:
    notes: list[str] = []
    file_format = "JPEG" if image.format == "MPO" else str(image.format)
    if file_format == "PNG" and getattr(image, "n_frames", 1) > 1:
        notes.append(f"{path.name} is animated: only the first of its {image.n_frames} frames is used.")
    if image.mode == "CMYK":
        notes.append("CMYK colours were converted to RGB.")
        image = _as_rgb(image)
    palette, transparent = None, ()
    deep = file_format == "PNG" and magic[24] == 16 and magic[25] in (2, 4, 6)
    if image.mode == "P":
        palette, transparent = _palette(image)
    elif "transparency" in image.info and image.mode in ("1", "L", "RGB") and not deep:
        image = image.convert("RGBA" if image.mode == "RGB" else "LA")
    if image.mode not in ("1", "L", "LA", "P", "RGB", "RGBA", "I", "I;16"):
        raise InputError(f"{path} has the colour mode {image.mode}, which is not supported; save it as RGB.")
    array = decode_png16(path) if deep else np.asarray(image)
    if file_format == "PNG" and image.mode == "I":
        array = array.astype(np.uint16)
    shallow = file_format == "PNG" and magic[25] == 0 and magic[24] in (2, 4)
    orientation = image.getexif().get(274, 1)
    dpi = image.info.get("dpi")
    resolution = (float(dpi[0]), float(dpi[1]), "inch") if dpi and min(dpi) > 0 else None
    resolution = swap_orientation(orientation, resolution)
    return Decoded(
        pages=to_pages(path, array, "YXS"[: array.ndim], axes, orientation),
        format=file_format,
        palette=palette,
        transparent=transparent,
        alpha=array.ndim == 3 and array.shape[2] in (2, 4) and axes is None,
        step=255 // ((1 << magic[24]) - 1) if shallow else 1,
        lossy=file_format == "JPEG",
        pixel_size=physical(resolution),
        resolution=resolution,
        notes=tuple(notes),
        page_axes=count_axes("YXS"[: array.ndim], axes, array.shape),
    )


def _as_rgb(image: Image.Image) -> Image.Image:
    converted = image.convert("RGB")
    converted.info = image.info
    return converted


def _palette(image: Image.Image) -> tuple[np.ndarray, tuple[int, ...]]:
    colours = np.array(image.getpalette("RGB"), np.uint8).reshape(-1, 3)
    alpha = image.info.get("transparency")
    if isinstance(alpha, int):
        return colours, (alpha,)
    return colours, tuple(i for i, a in enumerate(alpha or b"") if a == 0)


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
    text = " ".join(str(error).split())
    if len(text.split()) > 1:
        return text
    value = f", {text.strip(chr(39))}," if text and isinstance(error, KeyError) else ""
    return f"an entry of its header{value} is missing or impossible"


def _times(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
