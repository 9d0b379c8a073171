"""Micrographs: files in, arrays of known layout out, with everything that was noticed on the way.

The layout is always (z, h, w, c): pages, rows, columns, channels.  Values keep the file's own depth;
`normalize` is the only place where they are scaled.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from vispe.errors import InputError, did_you_mean
from vispe.images.formats.decode import decode
from vispe.images.formats.decoded_image import GIGAPIXEL, Decoded, PageAxes, Resolution
from vispe.images.formats.size_limits import enough_memory
from vispe.images.orientation import AS_STORED, Frame, Orientation, check_orientation
from vispe.images.sample import parse_crop, read_mask, transparent


@dataclass(frozen=True, eq=False)
class Micrograph:
    """An image file in memory.

    Attributes:
        path: the file.
        pages: (z, h, w, c) in the file's own number type, native byte order; c = 1 for grey, 3 for colour.
        pixel_size: microns per pixel (y, x); None where the file does not say.
        resolution: resolution tags as stored, (x, y, unit), with unit 'none', 'inch' or 'cm'.
        channel_names: one name per channel, or () where the file does not name them.
        notes: one sentence for each thing that the user should know, such as a dropped alpha channel.
        page_axes: the axes that count pages, slowest first; () for one page. A range of pages across
            several axes counts as one that has all their letters, such as 'TZ'.
        z_step: microns from one page to the next along Z; None where the file does not say.
        frame_interval: seconds from one page to the next along T; None where the file does not say.
        frame: the orientation tag of the file, and whether it was applied.
        sample: (z, h, w) bool, False for pixels that are excluded by a crop, a mask or transparency; None for none.
        exclusions: one sentence for each reason why pixels are excluded.
    """

    path: Path
    pages: np.ndarray
    pixel_size: tuple[float, float] | None = None
    resolution: Resolution | None = None
    channel_names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    page_axes: PageAxes = ()
    z_step: float | None = None
    frame_interval: float | None = None
    frame: Frame = AS_STORED
    sample: np.ndarray | None = None
    exclusions: tuple[str, ...] = ()

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return self.pages.shape[1], self.pages.shape[2]

    @property
    def n_pages(self) -> int:
        """Number of pages, z."""
        return self.pages.shape[0]

    @property
    def channels(self) -> int:
        """Number of channels, c."""
        return self.pages.shape[3]

    @property
    def axis_lengths(self) -> dict[str, int]:
        """The axes that count pages, with their lengths."""
        return dict(self.page_axes)

    @cached_property
    def valid(self) -> np.ndarray:
        """Boolean (z, h, w): the pixels that hold data, finite in every channel and not excluded."""
        return self.finite if self.sample is None else self.finite & self.sample

    def opaque_only(self, opaque: np.ndarray) -> "Micrograph":
        """Return the image without its transparent pixels; unchanged where all pixels are opaque, or none.

        Args:
            opaque: (z, h, w) bool.
        """
        if opaque.all() or not opaque.any():
            return self
        sample = opaque if self.sample is None else self.sample & opaque
        note = _excluded_note(self, opaque, "are transparent (alpha 0)")
        return replace(self, sample=sample, exclusions=(*self.exclusions, note))

    @cached_property
    def finite(self) -> np.ndarray:
        """Boolean (z, h, w): the pixels that are finite in every channel."""
        if self.pages.dtype.kind != "f":
            return np.ones(self.pages.shape[:3], bool)
        return np.isfinite(self.pages).all(-1)


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
    """Read a micrograph in its full depth: PNG, JPEG, TIFF, BMP, GIF, WebP, NPY, CZI, LIF, ND2, MRC, DM3 or DM4.

    Palettes become colours, an alpha channel is dropped with a note and its transparent pixels are excluded, values
    stored from white to black are inverted, and 1-bit files become 0 and 255.  Every axis but Y, X, C and S counts
    pages.

    Args:
        path: the file; its content decides how it is read, not its name.
        channel: which channels to keep, from 0: a number, a name that the file gives, several of them, or a
            comma-separated string.
        z: which pages to keep, from 0: a number or 'a:b' (b excluded); either side may be left out.
        axes: what each dimension of the stored array means, such as 'ZYX' or 'YXC'; None believes the file.
        scene: which of several scenes of a file of a microscope, by its name or number (from 0).
        orientation: 'tag' rotates and mirrors the pixels as the orientation tag of the file says; 'stored' does not.
        crop: rows and columns of the sample, such as '0:884,0:1024'; other pixels are excluded.
        mask: file of the size of the image, 0 for pixels that are excluded.

    Raises:
        MissingExtra: the library for a file of a microscope is not installed.
        InputError: missing, unreadable, truncated or empty file, only NaN, or a page or channel that is not
            there.
    """
    path = Path(path)
    with enough_memory(path):
        check_orientation(orientation)
        found = decode(path, axes=axes, scene=scene)
        frame = Frame(found.orientation, orientation == "tag")
        return _read(path, found.oriented() if frame.applied else found, frame, channel, z, crop, mask)


def _read(
    path: Path,
    found: Decoded,
    frame: Frame,
    channel: int | str | Sequence[int | str] | None,
    z: int | str | None,
    crop: str | None,
    mask: str | Path | None,
) -> Micrograph:
    notes = list(found.notes)
    if note := frame.note(path.name):
        notes.append(note)
    # the fourth of four planes may as well be a slice
    clear = None if found.planes else transparent(found)
    clear = None if clear is None else pick_pages(path, clear, z)
    pages = pick_pages(path, found.pages, z)
    page_axes = _picked_axes(found.page_axes, pick_pages(path, np.arange(len(found.pages)), z))
    pages = _plain_colours(pages, found, notes)
    names = found.channel_names if len(found.channel_names) == pages.shape[-1] else ()
    if channel is not None:
        chosen = channel_numbers(path, channel, pages.shape[-1], names)
        pages = np.ascontiguousarray(pages[..., chosen])
        names = tuple(names[i] for i in chosen) if names else ()
    known = {"pixel_size": found.pixel_size, "resolution": found.resolution, "z_step": found.z_step}
    known |= {"frame_interval": found.frame_interval, "frame": frame}
    image = Micrograph(path, pages, channel_names=names, page_axes=page_axes, **known)
    pixels = image.valid.size
    if pixels > GIGAPIXEL:
        notes.append(f"{path.name} has {pixels / 1e9:.1f} Gpixel; expect long run times and much memory.")
    invalid = pixels - int(image.finite.sum())
    if invalid == pixels:
        raise InputError(f"{path} holds no data: all {pixels} pixels are NaN or infinite.")
    if invalid:
        share = 100 * invalid / pixels
        notes.append(
            f"{invalid} pixels ({share:.2g} %) of {path.name} are NaN or infinite: treated as no data."
        )
    if found.pixel_size and abs(found.pixel_size[0] / found.pixel_size[1] - 1) > 0.01:
        y, x = found.pixel_size
        notes.append(f"the pixels of {path.name} are not square: {y:.4g} x {x:.4g} microns (y, x).")
    if crop is not None or mask is not None or clear is not None:
        image = _excluded(image, clear, crop, None if mask is None else Path(mask), notes)
    return replace(image, notes=tuple(notes))


def _excluded_note(image: Micrograph, inside: np.ndarray, why: str) -> str:
    share = 100 * float(1 - inside.mean())
    return f"{share:.3g} % of the pixels of {image.path.name} {why}: they count in no number."


def _excluded(
    image: Micrograph, clear: np.ndarray | None, crop: str | None, mask: Path | None, notes: list[str]
) -> Micrograph:
    """Exclude transparent pixels, and those outside of a crop or a mask."""
    shape, name = image.pages.shape[:3], image.path.name
    sample, reasons = np.ones(shape, bool), []

    def exclude(inside: np.ndarray, why: str) -> None:
        nonlocal sample
        if not inside.all():
            reasons.append(_excluded_note(image, inside, why))
            sample = sample & inside

    if clear is not None:
        if clear.all():
            notes.append(f"every pixel of {name} is transparent (alpha 0): the alpha channel is ignored.")
        image = image.opaque_only(~clear)
        sample, reasons = sample if image.sample is None else image.sample, list(image.exclusions)
    if crop is not None:
        inside = np.zeros(shape, bool)
        inside[(slice(None), *parse_crop(crop, image.shape))] = True
        exclude(inside, f"lie outside of the crop {crop}")
    if mask is not None:
        inside, more = read_mask(mask, shape, image.frame)
        notes += more
        exclude(inside, f"are excluded by the mask {mask.name}")
    image = replace(image, sample=sample if reasons else None, exclusions=tuple(reasons))
    if not image.valid.any():
        raise InputError(f"no pixel of {image.path} is left: {' '.join(reasons)}")
    return image


def _plain_colours(pages: np.ndarray, found: Decoded, notes: list[str]) -> np.ndarray:
    """Palette indices to colours, white-to-black to black-to-white, 1-bit to 8-bit; alpha goes."""
    if found.palette is not None:
        pages = _apply_palette(pages, found.palette, notes)
    elif found.min_is_white:
        pages = _invert(pages, found.min_is_white)
        notes.append("stored from white to black: values were turned round.")
    if pages.dtype == bool:
        pages = pages.astype(np.uint8) * np.uint8(255)
    if found.alpha:
        pages = np.ascontiguousarray(pages[..., :-1])
    if found.alpha or found.transparent:
        notes.append("alpha channel dropped.")
    return pages


def _apply_palette(pages: np.ndarray, palette: np.ndarray, notes: list[str]) -> np.ndarray:
    index = pages[..., 0]
    if (highest := int(index.max())) >= len(palette):
        raise InputError(f"a palette of {len(palette)} colours has no entry {highest}; the file is damaged.")
    if (palette == palette[:, :1]).all():
        notes.append("a palette of greys was read as one channel.")
        palette = palette[:, :1]
    return palette[index]


def _invert(pages: np.ndarray, bits: int) -> np.ndarray:
    if pages.dtype == bool:
        return ~pages
    if pages.dtype.kind == "u":
        return np.asarray((1 << bits) - 1, pages.dtype) - pages
    return ~pages if pages.dtype.kind == "i" else -pages


def pick_pages(path: Path, pages: np.ndarray, z: int | str | None) -> np.ndarray:
    """Keep the pages (z, ...) that a number such as 3 or a range such as 0:10 asks for; None keeps all."""
    if z is None:
        return pages
    n, text = len(pages), str(z).strip()
    match = re.fullmatch(r"(\d*):(\d*)|(\d+)", text)
    if not match:
        raise InputError(f"z={z!r} is not a page number such as 3, or a range such as 0:10.")
    first, last, single = match.groups()
    start, stop = (int(single), int(single) + 1) if single else (int(first or 0), int(last) if last else n)
    if not 0 <= start < stop <= n:
        raise InputError(f"z={text} asks for pages that {path} does not have; it has {n} (0 to {n - 1}).")
    return pages[start:stop]


def _picked_axes(axes: PageAxes, chosen: np.ndarray) -> PageAxes:
    """Give the axes of the chosen pages, a range of page numbers: all of them, some of the last axis, or mixed ones."""
    if len(chosen) == np.prod([n for _, n in axes], dtype=np.int64):
        return axes
    if len(chosen) == 1 or not axes:
        return ()
    letter, length = axes[-1]
    whole = chosen[0] // length == chosen[-1] // length
    return ((letter if whole else "".join(a for a, _ in axes), len(chosen)),)


def channel_numbers(
    path: Path, asked: int | str | Sequence[int | str], n: int, names: tuple[str, ...]
) -> list[int]:
    """Return the numbers of the channels that are asked for, by number or name, of `n`."""
    entries = [asked] if isinstance(asked, int) else asked.split(",") if isinstance(asked, str) else asked
    if not entries:
        raise InputError("channel names no channel; leave it out to keep all of them.")
    return [_channel(path, entry, n, names) for entry in entries]


def _channel(path: Path, entry: int | str, n: int, names: tuple[str, ...]) -> int:
    text = str(entry).strip()
    if text in names:
        return names.index(text)
    if text.isdecimal() and int(text) < n:
        return int(text)
    known = f", named {', '.join(names)}" if names else ""
    hint = did_you_mean(text, names)
    raise InputError(f"channel={text} is not in {path}; it has {n} (0 to {n - 1}{known}).{hint}")
