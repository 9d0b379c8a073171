"""Images of a paint session, which share one model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vispe.errors import InputError, is_integer
from vispe.segment.live.live_segmentation import Live
from vispe.segment.live.paint.painted_image import PaintedImage
from vispe.segment.run.inputs import common_channel_count
from vispe.segment.types import Prediction


class PaintedImages(Sequence[PaintedImage]):
    """Images in their order; one classifier is trained on the scribbles of all of them.

    Args:
        images: the images, of which the first has a session; their file names must differ, suffixes ignored.

    Raises:
        InputError: images cannot share a model or a folder, or a page does not exist.
    """

    def __init__(self, images: Sequence[PaintedImage]) -> None:
        self._images = list(images)
        stems: dict[str, Path] = {}
        for item in self._images:
            path, pages = item.image.path, item.image.n_pages
            if not 0 <= item.page < pages:
                raise InputError(
                    f"page {item.page} does not exist in {path}, which has pages 0 to {pages - 1}."
                )
            if (other := stems.setdefault(path.stem.casefold(), path)) is not path:
                raise InputError(
                    f"{other} and {path} would be saved to the same files, because both are named {path.stem}. Rename "
                    "one."
                )
        common_channel_count({item.image.path: item.image.channels for item in self._images}, "images")

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self._images)

    def __getitem__(self, number: int) -> PaintedImage:
        """Return an image."""
        return self._images[number]

    def checked_number(self, number: Any) -> int:
        """Return the index of an image; InputError if it does not exist."""
        if not is_integer(number) or not 0 <= number < len(self):
            raise InputError(
                f"image {str(number)[:20]} does not exist; there are images 0 to {len(self) - 1}."
            )
        return int(number)

    def check_classes(self, names: Sequence[str], changed: PaintedImage) -> None:
        """Raise InputError if an image, other than the one with new scribbles, has scribbles of a missing class."""
        for item in self:
            if item is not changed and any(stroke.level[0] > len(names) for stroke in item.strokes):
                raise InputError(
                    f"names={', '.join(names)} are fewer than the classes of the scribbles on {item.image.path.name}. "
                    "Erase these scribbles first."
                )

    def session(self, item: PaintedImage) -> Live:
        """Return the session of an image; it is created when the image is needed for the first time."""
        if item.live is None:
            first = self._images[0].live
            assert first is not None
            item.live = first.for_image(item.image, item.page)
        return item.live

    def has_two_classes(self) -> bool:
        """Return whether pixels of two classes are labelled; a scribble covered by another one has no pixel."""
        return len(frozenset[int]().union(*(item.classes() for item in self))) > 1

    def segment(
        self, shown: PaintedImage, names: Sequence[str], preview: bool, step: Callable[[float], None] | None
    ) -> Prediction:
        """Train on the scribbles of all images, and segment one of them.

        Args:
            shown: the image to segment.
            names: class names.
            preview: use `Live.preview_kind`, which is faster than the classifier of the session.
            step: called with fractions of the prediction; an exception ends it.
        """
        live, sessions = self.session(shown), []
        for item in self:
            if item.live is not None or item.strokes:
                sessions.append(self.session(item))
                item.draw(sessions[-1])
        live.select_page(shown.page)
        live.names = tuple(names)
        if len(sessions) > 1:
            live.fit(preview, sessions)
        else:
            live.fit(preview)
        return live.predict(step=step)

    def label_map(self, item: PaintedImage) -> np.ndarray:
        """Return the label map (h, w) uint8 of an image by the current model."""
        live = self.session(item)
        live.select_page(item.page)
        return live.predict().labels
