"""Image of a paint session: its scribbles, files and state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vispe.images.labels.stroke_pixels import Stroke, stroke_pixels
from vispe.images.read import Micrograph
from vispe.segment.live.live_segmentation import Live


@dataclass(eq=False)
class PaintedImage:
    """One page of an image with its scribbles.

    Attributes:
        image: the image.
        page: its page, from 0.
        live: its session; None before the image is shown for the first time.
        strokes: its scribbles, later ones over earlier ones.
    """

    image: Micrograph
    page: int
    live: Live | None = None
    strokes: list[Stroke] = field(default_factory=list)
    _drawn: list[Stroke] | None = None  # scribbles that `live` has
    _present: tuple[list[Stroke], frozenset[int]] | None = None  # scribbles, and the classes of their pixels

    def labels(self) -> np.ndarray:
        """Return the labels (h, w) uint8 of the scribbles, later ones over earlier ones, 0 = none."""
        h, w = self.image.shape
        labels = np.zeros((h, w), np.uint8)
        for stroke in self.strokes:
            labels[stroke_pixels(stroke, h, w)] = int(stroke.level[0])
        return labels

    def classes(self) -> frozenset[int]:
        """Return the classes of the labelled pixels."""
        if self._present is None or self._present[0] is not self.strokes:
            labels = self.labels() if self.strokes else np.zeros(0, np.uint8)
            self._present = self.strokes, frozenset(np.unique(labels[labels > 0]).tolist())
        return self._present[1]

    def draw(self, live: Live) -> None:
        """Pass the scribbles to the session, unless it has them."""
        if self._drawn is not self.strokes:
            live.draw(self.labels())
            self._drawn = self.strokes

    def single_page(self) -> Micrograph:
        """Return the page as an image of its own."""
        page = self.image.pages[self.page : self.page + 1]
        return Micrograph(self.image.path, page, self.image.pixel_size, self.image.resolution)

    def scribble_file(self, out: Path) -> Path:
        """Return the file of the scribbles in a folder."""
        return out / f"{self.image.path.stem}_strokes.json"

    def label_file(self, out: Path) -> Path:
        """Return the file of the label map in a folder."""
        return out / f"{self.image.path.stem}_seg.png"

    def state(self) -> Mapping[str, Any]:
        """Return the state of the image for the window, JSON-able."""
        height, width = self.image.shape
        return {
            "title": self.image.path.name,
            "width": width,
            "height": height,
            "page": self.page,
            "pages": self.image.n_pages,
            "strokes": listed(self.strokes),
        }


def listed(strokes: Sequence[Stroke]) -> list[dict[str, Any]]:
    """Return scribbles in the format of the labels of `vispe segment`."""
    return [
        {
            "class": int(s.level[0]),
            "width": s.width,
            "points": np.round(s.points, 2).tolist(),
            "page": s.page,
        }
        for s in strokes
    ]
