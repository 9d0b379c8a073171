"""Types that several packages of the segmentation share."""

from pathlib import Path
from typing import Protocol

import numpy as np

from vispe.images.orientation import Frame


class ImageFacts(Protocol):
    """Metadata of an image, in memory or read on demand.

    Attributes:
        path: the file or store.
        n_pages: number of pages.
        shape: height and width in pixels.
        channels: number of channels.
        channel_names: name of each channel, or ().
        pixel_size: microns per pixel (y, x); None if unknown.
        resolution: resolution tags of the file (x, y, unit); None if unknown.
        axis_lengths: lengths of the axes with more than one page.
        z_step: microns between pages along Z; None if unknown.
        frame_interval: seconds between pages along T; None if unknown.
        frame: orientation tag of the file.
        sample: (h, w) bool, pixels of the sample; None excludes none.
    """

    path: Path
    n_pages: int
    shape: tuple[int, int]
    channels: int
    channel_names: tuple[str, ...]
    pixel_size: tuple[float, float] | None
    resolution: tuple[float, float, str] | None
    axis_lengths: dict[str, int]
    z_step: float | None
    frame_interval: float | None
    frame: Frame
    sample: np.ndarray | None
