"""Dispatch of image files to the decoder of their format, and decoding by Pillow."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from vispe.errors import InputError, counted, require
from vispe.images.formats.decoded_image import (
    BROKEN,
    PILLOW_FORMATS,
    TIFF_MAGIC,
    Decoded,
    count_axes,
    damaged,
    largest_frame,
    no_size_limit,
    physical,
    to_pages,
)
from vispe.images.formats.integrity import PNG_CHANNELS, jpeg_damage, png_damage
from vispe.images.formats.metadata import png_scale
from vispe.images.formats.numpy_files import decode_npy
from vispe.images.formats.pfm_files import decode_pfm, is_pfm
from vispe.images.formats.size_limits import LARGE, check_size
from vispe.images.formats.unsupported import unsupported_format
from vispe.images.formats.vendors.registry import decode_vendor, vendor_of
from vispe.images.orientation import known_tag
from vispe.images.paths import check_file


def decode(
    path: str | Path,
    *,
    axes: str | None = None,
    size: tuple[int, int] | None = None,
    scene: str | None = None,
) -> Decoded:
    """Read an image file without changing any value.

    Args:
        path: TIFF, PNG, JPEG, BMP, GIF, WebP, NPY, PFM, CZI, LIF, ND2, MRC, DM3, DM4, HDF5, NRRD, MHA or NIfTI file;
            the format is detected from its contents, not its name.
        axes: axis of each dimension of the stored array, such as 'ZYX' or 'YXC'; None uses the metadata of the file.
        size: expected height and width, if any; files of this size may have any compression ratio.
        scene: scene of a CZI, LIF, ND2, DM3, DM4 or HDF5 file, by its name or number (from 0).

    Raises:
        InputError: the file is missing, not an image, truncated, without pixels, or too large for the memory
            or for the file size; or `axes` does not match.
        MissingExtra: the library for the format is not installed.
    """
    path = Path(path)
    check_file(path)
    try:
        with path.open("rb") as stream:
            magic = stream.read(352)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from error
    if not magic:
        raise InputError(f"{path} is empty (0 bytes). Export the image again.")
    if vendor := vendor_of(magic):
        return decode_vendor(path, vendor, axes, scene)
    if scene is not None:
        raise InputError(f"{path}: `scene` has no effect for this format, got {scene!r}. Omit it.")
    if magic.startswith(b"\x93NUMPY"):
        return decode_npy(path, axes, size)
    if is_pfm(magic):
        return decode_pfm(path, axes)
    if magic[:4] in TIFF_MAGIC:
        require("tifffile", "cli", f"reading {path.name} (TIFF)")
        from vispe.images.formats.tiff import decode_tiff

        return decode_tiff(path, axes, size)
    return _decode_pillow(path, axes, magic, size)


def _decode_pillow(path: Path, axes: str | None, magic: bytes, size: tuple[int, int] | None) -> Decoded:
    try:
        with (
            no_size_limit(),
            _warned(path) as notes,
            Image.open(path, formats=PILLOW_FORMATS) as image,
        ):
            frame = largest_frame(image)
            if getattr(image, "n_frames", 1) > 1 and image.format == "MPO":
                which = "first" if frame == 0 else f"largest (number {frame + 1})"
                notes.append(
                    f"{path.name} holds {counted(image.n_frames, 'image')}: only the {which} is used."
                )
            _check_claim(path, image, magic, size)
            if image.format == "PNG":
                notes += png_damage(path)
            image.load()
            if image.format in ("JPEG", "MPO"):
                notes += jpeg_damage(path)
            decoded = _from_pillow(path, image, axes, magic)
        return replace(decoded, notes=(*notes, *decoded.notes))
    except UnidentifiedImageError as error:
        remedy = unsupported_format(path) or "convert it to one of these"
        raise InputError(
            f"{path} is not a readable PNG, JPEG, TIFF, BMP, GIF or WebP image; {remedy}."
        ) from error
    except InputError:
        raise
    except BROKEN as error:
        raise damaged(path, error) from error


def _check_claim(path: Path, image: Image.Image, magic: bytes, size: tuple[int, int] | None) -> None:
    w, h = image.size
    bits, samples = 8, len(image.getbands())
    if image.format == "PNG":
        bits, samples = magic[24], PNG_CHANNELS.get(magic[25], 1)
    # Pillow decodes run-length encoded BMP files pixel by pixel, so the limit is lower
    free = 1 << 24 if image.info.get("compression") in (1, 2) and image.format == "BMP" else LARGE
    check_size(path, (h, w, samples) if samples > 1 else (h, w), bits, free=free, trusted=size == (h, w))


@contextmanager
def _warned(path: Path) -> Iterator[list[str]]:
    """Collect the warnings of Pillow, which reports some damage only as warnings."""
    notes: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield notes
    notes += [f"{path.name}: {' '.join(str(w.message).split())}" for w in caught]


def _from_pillow(path: Path, image: Image.Image, axes: str | None, magic: bytes) -> Decoded:
    notes: list[str] = []
    file_format = "JPEG" if image.format == "MPO" else str(image.format)
    if file_format in ("PNG", "GIF", "WEBP") and getattr(image, "n_frames", 1) > 1:
        notes.append(
            f"{path.name} is animated: only the first of its {counted(image.n_frames, 'frame')} is used."
        )
    if image.mode == "CMYK":
        notes.append("CMYK colours were converted to RGB.")
        image = _as_rgb(image)
    palette, transparent = None, ()
    deep = file_format == "PNG" and magic[24] == 16 and magic[25] in PNG_CHANNELS
    if image.mode == "P":
        palette, transparent = _palette(image)
    elif "transparency" in image.info and image.mode in ("1", "L", "RGB") and not deep:
        image = image.convert("RGBA" if image.mode == "RGB" else "LA")
    if image.mode not in ("1", "L", "LA", "P", "RGB", "RGBA", "I", "I;16"):
        raise InputError(f"{path}: unsupported colour mode, got {image.mode}. Save it as RGB.")
    array = decode_png16(path, magic) if deep else np.asarray(image)
    if file_format == "PNG" and image.mode == "I":
        array = array.astype(np.uint16)
    shallow = file_format == "PNG" and magic[25] == 0 and magic[24] in (2, 4)
    orientation = known_tag(image.getexif().get(274, 1))
    dpi = image.info.get("dpi")
    resolution = (float(dpi[0]), float(dpi[1]), "inch") if dpi and min(dpi) > 0 else None
    return Decoded(
        pages=to_pages(path, array, "YXS"[: array.ndim], axes),
        format=file_format,
        palette=palette,
        transparent=transparent,
        alpha=array.ndim == 3 and array.shape[2] in (2, 4) and axes is None,
        step=255 // ((1 << magic[24]) - 1) if shallow else 1,
        lossy=file_format == "JPEG" or (file_format == "WEBP" and not _lossless(path)),
        pixel_size=(png_scale(path) if file_format == "PNG" else None) or physical(resolution),
        resolution=resolution,
        notes=tuple(notes),
        orientation=orientation,
        page_axes=count_axes("YXS"[: array.ndim], axes, array.shape),
    ).with_axes("YXS"[: array.ndim], axes)


def _lossless(path: Path) -> bool:
    """Return whether a WebP file has lossless compression, from its chunks."""
    with path.open("rb") as stream:
        stream.seek(12)
        while len(head := stream.read(8)) == 8:
            if head[:4] in (b"VP8 ", b"ANMF"):
                return False
            if head[:4] == b"VP8L":
                return True
            # chunks are padded to an even number of bytes
            size = int.from_bytes(head[4:], "little")
            stream.seek(size + size % 2, 1)
    return False


def decode_png16(path: Path, header: bytes) -> np.ndarray:
    """Decode a PNG of 16-bit colours, which Pillow would truncate to 8 bits -> (h, w, c) uint16.

    Args:
        path: the file.
        header: first 29 bytes of the file.

    Raises:
        InputError: interlaced.
        MissingExtra: imagecodecs is not installed.
    """
    if header[28]:
        raise InputError(
            f"{path}: interlaced 16-bit colour PNG is not supported. Save it without interlacing."
        )
    require("imagecodecs", "cli", f"reading {path.name} (PNG of 16-bit colours)")
    import imagecodecs

    # tRNS declares a colour as transparent, which is ignored: only the stored channels are used
    return imagecodecs.png_decode(path.read_bytes())[..., : PNG_CHANNELS[header[25]]]


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
