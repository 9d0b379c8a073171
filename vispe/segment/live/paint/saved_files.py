"""Files of a paint session: scribbles, model and label maps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from vispe.errors import InputError
from vispe.images.write import write_labels
from vispe.segment.live.paint.painted_image import PaintedImage, listed
from vispe.segment.model.model_file import Model, save_model
from vispe.utils.files import check_writable, write_json

MODEL = "model.vispe"
"""Name of the model file."""


class SavedFiles:
    """The files of a session in a folder, and which of them the session has written.

    Args:
        out: the folder.
        force: overwrite existing files.
    """

    def __init__(self, out: Path, force: bool) -> None:
        self.out, self.force = out, force
        self._written: set[Path] = set()

    def write(
        self,
        images: Iterable[PaintedImage],
        model: Model | None,
        label_map: Callable[[PaintedImage], np.ndarray],
    ) -> list[str]:
        """Write the scribbles of each image, and, with a model, the model and the label maps; return the file names.

        Each image that was shown has a label map. A file of scribbles that this session wrote is removed if the image
        has no scribbles any more.

        Args:
            images: the images of the session.
            model: the model; None without a result.
            label_map: returns the label map (h, w) uint8 of an image by the model.

        Raises:
            InputError: no scribble yet, or a file exists that this session has not written.
        """
        images = list(images)
        painted = [item for item in images if item.strokes]
        segmented = [item for item in images if item.live is not None and model is not None]
        if not painted:
            raise InputError("there is nothing to save yet. Paint a scribble first.")
        paths = [item.scribble_file(self.out) for item in painted]
        if model is not None:
            paths += [self.out / MODEL, *(item.label_file(self.out) for item in segmented)]
        unwritten = [path for path in paths if path not in self._written]
        inputs = [item.image.path for item in images if item.image.path.is_file()]
        check_writable(unwritten, self.force, protect=inputs)
        self.out.mkdir(parents=True, exist_ok=True)
        # record each file at once: it may be overwritten later, even if the next one fails
        for item in painted:
            write_json(item.scribble_file(self.out), listed(item.strokes), force=True)
            self._written.add(item.scribble_file(self.out))
        if model is not None:
            self._written.add(save_model(self.out / MODEL, model, True))
        for item in segmented:
            path = item.label_file(self.out)
            self._written.add(write_labels(path, label_map(item)[None], item.single_page(), True))
        for item in images:
            stale = item.scribble_file(self.out)
            if not item.strokes and stale in self._written:
                stale.unlink(missing_ok=True)
                self._written.discard(stale)
        return [path.name for path in paths]
