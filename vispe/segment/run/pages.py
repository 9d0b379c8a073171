"""Pages of an image, and the labelled pixels on them."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from vispe.segment.features.filters.filters3d import Stack
from vispe.segment.run.inputs import BatchImage


class Pages(Protocol):
    """Normalised pages of an image, in memory or read on demand.

    Attributes:
        shape: height and width.
        stack: the volumes that the pages belong to, for 3D filters; None without these.
        exclusions: messages about excluded pixels.
    """

    shape: tuple[int, int]
    stack: Stack | None
    exclusions: tuple[str, ...]

    def page(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return grey levels (h, w, c) and the mask (h, w) of pixels with data; both are only indexed."""

    def have_data(self, number: int, indices: np.ndarray) -> np.ndarray:
        """Return which pixels y * w + x (n,) of a page have data, as (n,) bool."""


@dataclass(frozen=True, eq=False)
class TrainingLabels:
    """Labelled pixels of a run, with a common class numbering.

    Attributes:
        images: the labelled images.
        indices: (n,) int64 of each image, ascending: (page * h + y) * w + x.
        classes: (n,) int of each image, 1..K.
        names: class names.
        colors: colours of the classes.
        channels: number of channels of the images.
    """

    images: list[BatchImage]
    indices: list[np.ndarray]
    classes: list[np.ndarray]
    names: tuple[str, ...]
    colors: tuple[tuple[int, int, int], ...] | None
    channels: int
