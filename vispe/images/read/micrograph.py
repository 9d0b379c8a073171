"""Image file in memory: pixels, metadata, and the excluded pixels."""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from vispe.images.formats.decoded_image import PageAxes, Resolution
from vispe.images.orientation import AS_STORED, Frame


@dataclass(frozen=True, eq=False)
class Micrograph:
    """An image file in memory.

    Attributes:
        path: the file.
        pages: (z, h, w, c) in the dtype of the file, native byte order; c = 1 for grey, 3 for colour.
        pixel_size: microns per pixel (y, x), or None if unknown.
        resolution: resolution tags as stored, (x, y, unit), with unit 'none', 'inch' or 'cm'.
        channel_names: one name per channel, or () if the file has no names.
        notes: notes for the user, such as a dropped alpha channel.
        page_axes: page axes, slowest first; () for one page. A range of pages across several axes is one axis with
            all their letters, such as 'TZ'.
        z_step: microns between pages along Z, or None if unknown.
        frame_interval: seconds between pages along T, or None if unknown.
        frame: orientation tag of the file, and whether it was applied.
        sample: (z, h, w) bool, False for pixels excluded by a crop, a mask or transparency; None if there are none.
        exclusions: one sentence for each reason for exclusions.
        multichannel: whether the file has several channels that are not RGB, also if one of them is selected.
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
    multichannel: bool = False

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
        """Page axes with their lengths."""
        return dict(self.page_axes)

    @cached_property
    def valid(self) -> np.ndarray:
        """Boolean (z, h, w): pixels with data, finite in every channel and not excluded."""
        return self.finite if self.sample is None else self.finite & self.sample

    def exclude(self, inside: np.ndarray, reason: str) -> "Micrograph":
        """Return the image without the pixels outside of `inside`; the same image if there are none.

        Args:
            inside: (z or 1, h, w) bool.
            reason: predicate of the excluded pixels for the note, such as 'are transparent'.
        """
        if inside.all():
            return self
        sample = np.ones(self.pages.shape[:3], bool) if self.sample is None else self.sample
        percentage = 100 * float(1 - inside.mean())
        note = f"{percentage:.3g} % of the pixels of {self.path.name} {reason} and are excluded from all numbers."
        return replace(self, sample=sample & inside, exclusions=(*self.exclusions, note))

    def exclude_transparent(self, opaque: np.ndarray) -> "Micrograph":
        """Return the image without its transparent pixels; the same image if no pixel (z, h, w) is opaque."""
        return self.exclude(opaque, "are transparent (alpha 0)") if opaque.any() else self

    @cached_property
    def finite(self) -> np.ndarray:
        """Boolean (z, h, w): pixels that are finite in every channel."""
        if self.pages.dtype.kind != "f":
            return np.ones(self.pages.shape[:3], bool)
        return np.isfinite(self.pages).all(-1)
