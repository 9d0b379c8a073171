"""Reading of micrographs as arrays (z, h, w, c) with metadata and notes.

The layout is always (z, h, w, c): pages, rows, columns, channels. Values have the bit depth of the file; only
`vispe.images.normalize` scales them.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from vispe.errors import InputError, counted
from vispe.images.formats.decode import decode
from vispe.images.formats.decoded_image import GIGAPIXEL, Decoded
from vispe.images.formats.size_limits import enough_memory
from vispe.images.orientation import Frame, Orientation, check_orientation
from vispe.images.read.micrograph import Micrograph
from vispe.images.read.selection import channel_numbers, pick_pages, picked_axes
from vispe.images.sample import parse_crop, read_mask, transparent


def read_image(
    path: str | Path,
    *,
    channel: int | str | Sequence[int | str] | None = None,
    z: int | str | None = None,
    axes: str | None = None,
    scene: str | None = None,
    orientation: Orientation = "tag",
    crop: str | None = None,
    mask: str | Path | None = None,
) -> Micrograph:
    """Read a micrograph at full bit depth: PNG, JPEG, TIFF, BMP, GIF, WebP, NPY, PFM or files of microscopes.

    Palettes are converted to colours, an alpha channel is dropped with a note and its transparent pixels are excluded,
    MinIsWhite values are inverted, and 1-bit files become 0 and 255. Every axis except Y, X, C and S is a page axis.

    Args:
        path: the file; the format is detected from its contents, not its name.
        channel: channels to read, from 0: a number, a name, several of them, or a comma-separated string.
        z: pages to read, from 0: a number or 'a:b' (b excluded); either bound may be omitted.
        axes: axis of each dimension of the stored array, such as 'ZYX' or 'YXC'; None uses the metadata of the file.
        scene: scene of a microscope file, by its name or number (from 0).
        orientation: 'tag' rotates and mirrors the pixels by the orientation tag of the file; 'stored' does not.
        crop: rows and columns of the sample, such as '0:884,0:1024'; other pixels are excluded.
        mask: file of the size of the image, 0 for excluded pixels.

    Raises:
        MissingExtra: the library for a microscope format is not installed.
        InputError: the file is missing, unreadable, truncated or empty, all values are NaN, or a page or
            channel does not exist.
        OptionError: invalid `orientation` or `crop`.

    Example:
        >>> import tempfile
        >>> import numpy as np
        >>> path = Path(tempfile.mkdtemp()) / "stack.npy"
        >>> np.save(path, np.zeros((5, 32, 48), np.uint16))
        >>> read_image(path, axes="ZYX", z="1:3").pages.shape
        (2, 32, 48, 1)
    """
    path = Path(path)
    with enough_memory(path):
        check_orientation(orientation)
        decoded = decode(path, axes=axes, scene=scene)
        frame = Frame(decoded.orientation, orientation == "tag")
        return _read(path, decoded.oriented() if frame.applied else decoded, frame, channel, z, crop, mask)


def _read(
    path: Path,
    decoded: Decoded,
    frame: Frame,
    channel: int | str | Sequence[int | str] | None,
    z: int | str | None,
    crop: str | None,
    mask: str | Path | None,
) -> Micrograph:
    notes = list(decoded.notes)
    if note := frame.note(path.name):
        notes.append(note)
    # the fourth of four colour planes may also be a slice of a stack, so it is not used as alpha here
    transparent_pixels = None if decoded.planes else transparent(decoded)
    transparent_pixels = None if transparent_pixels is None else pick_pages(path, transparent_pixels, z)
    pages = pick_pages(path, decoded.pages, z)
    chosen = pick_pages(path, np.arange(len(decoded.pages)), z)
    page_axes = picked_axes(decoded.page_axes, chosen)
    frame = frame.with_pages(decoded.page_axes, chosen)
    pages = _plain_colours(pages, decoded, notes)
    names = decoded.channel_names if len(decoded.channel_names) == pages.shape[-1] else ()
    rgb = pages.shape[-1] == 3 and pages.dtype == np.uint8 and not names
    multichannel = pages.shape[-1] > 1 and not rgb
    if channel is not None:
        chosen = channel_numbers(path, channel, pages.shape[-1], names)
        pages = np.ascontiguousarray(pages[..., chosen])
        names = tuple(names[i] for i in chosen) if names else ()
    metadata = {"pixel_size": decoded.pixel_size, "resolution": decoded.resolution, "z_step": decoded.z_step}
    metadata |= {"frame_interval": decoded.frame_interval, "frame": frame, "multichannel": multichannel}
    image = Micrograph(path, pages, channel_names=names, page_axes=page_axes, **metadata)
    pixels = image.valid.size
    if pixels > GIGAPIXEL:
        notes.append(f"{path.name} has {pixels / 1e9:.1f} Gpixel; expect long run times and much memory.")
    invalid = pixels - int(image.finite.sum())
    if invalid == pixels:
        raise InputError(f"{path} holds no data: all {pixels} pixels are NaN or infinite.")
    if invalid:
        percentage, verb = 100 * invalid / pixels, "is" if invalid == 1 else "are"
        notes.append(
            f"{counted(invalid, 'pixel')} ({percentage:.2g} %) of {path.name} {verb} NaN or infinite: treated as no "
            "data."
        )
    if decoded.pixel_size and abs(decoded.pixel_size[0] / decoded.pixel_size[1] - 1) > 0.01:
        y, x = decoded.pixel_size
        notes.append(f"the pixels of {path.name} are not square: {y:.4g} x {x:.4g} microns (y, x).")
    if crop is not None or mask is not None or transparent_pixels is not None:
        image = _exclude(image, transparent_pixels, crop, None if mask is None else Path(mask), notes)
    return replace(image, notes=tuple(notes))


def _exclude(
    image: Micrograph,
    transparent_pixels: np.ndarray | None,
    crop: str | None,
    mask: Path | None,
    notes: list[str],
) -> Micrograph:
    """Exclude transparent pixels, and pixels outside of a crop or a mask."""
    shape = image.pages.shape[:3]
    if transparent_pixels is not None:
        if transparent_pixels.all():
            notes.append(
                f"every pixel of {image.path.name} is transparent (alpha 0): the alpha channel is ignored."
            )
        image = image.exclude_transparent(~transparent_pixels)
    if crop is not None:
        inside = np.zeros(shape, bool)
        inside[(slice(None), *parse_crop(crop, image.shape))] = True
        image = image.exclude(inside, f"are outside of the crop {crop}")
    if mask is not None:
        inside, mask_notes = read_mask(mask, shape, image.frame)
        notes += mask_notes
        image = image.exclude(inside, f"are excluded by the mask {mask.name}")
    if not image.valid.any():
        raise InputError(f"{image.path}: all pixels are excluded: {' '.join(image.exclusions)}")
    return image


def _plain_colours(pages: np.ndarray, decoded: Decoded, notes: list[str]) -> np.ndarray:
    """Convert palette indices to colours, invert MinIsWhite, expand 1 bit to 8 bits, and drop alpha."""
    if decoded.palette is not None:
        pages = _apply_palette(pages, decoded.palette, notes)
    elif decoded.min_is_white:
        pages = _invert(pages, decoded.min_is_white)
        notes.append("stored from white to black (MinIsWhite): values were inverted.")
    if pages.dtype == bool:
        pages = pages.astype(np.uint8) * np.uint8(255)
    if decoded.alpha:
        pages = np.ascontiguousarray(pages[..., :-1])
    if decoded.alpha or decoded.transparent:
        notes.append("alpha channel dropped.")
    return pages


def _apply_palette(pages: np.ndarray, palette: np.ndarray, notes: list[str]) -> np.ndarray:
    index = pages[..., 0]
    if (highest := int(index.max())) >= len(palette):
        raise InputError(
            f"the palette has {counted(len(palette), 'colour')}, but the image uses entry {highest}: damaged file."
        )
    if (palette == palette[:, :1]).all():
        notes.append("a palette of grey levels was read as one channel.")
        palette = palette[:, :1]
    return palette[index]


def _invert(pages: np.ndarray, bits: int) -> np.ndarray:
    if pages.dtype == bool:
        return ~pages
    if pages.dtype.kind == "u":
        return np.asarray((1 << bits) - 1, pages.dtype) - pages
    return ~pages if pages.dtype.kind == "i" else -pages
