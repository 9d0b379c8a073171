"""Paint session: scribbles, classes and results of the pages of one or several images, independent of the server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vispe.errors import InputError
from vispe.images.read import Micrograph
from vispe.segment.classify.pixel_classifier import KINDS
from vispe.segment.features.feature_config import FeatureConfig
from vispe.segment.live.labelled_pages import MAX_CLASSES
from vispe.segment.live.live_segmentation import Live
from vispe.segment.live.paint.checks import checked_names, checked_strokes
from vispe.segment.live.paint.painted_image import PaintedImage, listed
from vispe.segment.live.paint.painted_images import PaintedImages
from vispe.segment.live.paint.saved_files import MODEL, SavedFiles
from vispe.segment.live.paint.window_images import shown_png, shown_result
from vispe.segment.overlays import PALETTE
from vispe.segment.types import Prediction


class StaleWindow(InputError):
    """Scribbles from a window that is unaware of changes in another window."""


class _SupersededError(Exception):
    """A newer request arrived while a result was computed."""


class Paint:
    """Pages with their scribbles and results, and the classes that they share.

    One classifier is trained on the scribbles of all images. The window shows one image; `image`, `live` and
    `prediction` are those of this image.

    Args:
        image: the image that is shown first.
        page: its page, from 0.
        out: folder for saved files.
        names: initial class names.
        features: features of a pixel; None for those of `vispe segment`.
        classifier: `'ensemble'`, `'logistic'`, `'forest'` or `'boosting'`.
        seed: seed of all random numbers.
        device: device of the features.
        force: overwrite existing files.
        more: further images and their pages; their file names must differ, suffixes ignored.

    Attributes:
        images: all images in their order.
        shown: index of the image shown.

    Raises:
        OptionError: fewer than two names, duplicate names, or too many.
        InputError: a page does not exist.
    """

    def __init__(
        self,
        image: Micrograph,
        page: int,
        out: Path,
        *,
        names: Sequence[str] = (),
        features: FeatureConfig | None = None,
        classifier: str = KINDS[0],
        seed: int = 0,
        device: str = "auto",
        force: bool = False,
        more: Sequence[tuple[Micrograph, int]] = (),
    ) -> None:
        self.out, self.shown = out, 0
        live = Live(image, page=page, features=features, classifier=classifier, seed=seed, device=device)
        self.images = PaintedImages(
            [PaintedImage(image, page, live), *(PaintedImage(*each) for each in more)]
        )
        self.names = checked_names(names or ("background", "object"))
        self.prediction: Prediction | None = None
        self.saved = True
        self.revision = 0
        self._window: str | None = None  # identifier of the window that sent the scribbles
        self._files = SavedFiles(out, force)
        self._lock = threading.Lock()
        self._is_preview = False  # whether the result is that of the preview classifier
        self._newest: object = None  # identifies the newest request

    @property
    def image(self) -> Micrograph:
        """The image shown."""
        return self.images[self.shown].image

    @property
    def live(self) -> Live:
        """Session of the image shown."""
        return self.images.session(self.images[self.shown])

    def state(self) -> dict[str, Any]:
        """Return the state of the window, JSON-able."""
        item = self.images[self.shown]
        return {
            **item.state(),
            "images": [each.image.path.name for each in self.images],
            "image": self.shown,
            "most": MAX_CLASSES,
            "palette": [list(map(int, color)) for color in PALETTE],
            "names": self.names,
            "saved": self.saved,
            "revision": self.revision,
            "files": [item.scribble_file(self.out).name, MODEL, item.label_file(self.out).name],
            "folder": str(self.out),
        }

    def image_png(self, number: int | None = None) -> bytes:
        """Return an image as shown in the window, a PNG of at most 2048 pixels; None: the image shown.

        Raises:
            InputError: no such image.
        """
        item = self.images[self.shown if number is None else self.images.checked_number(number)]
        if item.live is None:
            # a new session selects its page in the shared feature cache
            with self._lock:
                self.images.session(item)
        return shown_png(self.images.session(item))

    def show(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Set scribbles and classes as `update` does, without a result, and show the image with the index 'show'.

        Returns:
            The state of the window.

        Raises:
            InputError, OptionError: invalid scribbles or names, or no such image.
            StaleWindow: as in `update`.
        """
        self._newest = object()
        with self._lock:
            number = self.images.checked_number(content.get("show"))
            if self._apply(content) or number != self.shown:
                self.prediction = None
            self.shown = number
            return self.state()

    def update(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Set scribbles and classes, and segment the page again.

        Args:
            content: 'names', and 'strokes', a list of 'class' (from 1), 'width' and 'points'. With several images,
                'image' is the index of theirs; without it, they belong to the image shown. A browser window adds
                'window', its own random identifier, 'revision', the last one it received, and 'preview', whether to
                answer with `Live.preview_kind`, which is faster than the classifier of the session.

        Returns:
            'ready', whether there is a result: the entries of `shown_result`, 'preview', whether the classifier of
            the session differs from that of the result, and 'notes'; else 'why', the reason. For a browser window
            also 'revision'. A result that is not a preview is abandoned if another request arrives.

        Raises:
            InputError, OptionError: invalid scribbles or names.
            StaleWindow: another window has changed the scribbles since `revision`.
        """
        request = self._newest = object()
        with self._lock:
            self._apply(content)
            answer = self._answer(request, content.get("preview") is True)
            return answer | ({"revision": self.revision} if "window" in content else {})

    def _answer(self, request: object, preview: bool) -> dict[str, Any]:
        """Segment the page again, and return the result of `update`."""
        self.prediction = None
        if not self.images.has_two_classes():
            return {"ready": False, "why": "paint scribbles of at least two classes."}

        def check(fraction: float) -> None:
            if request is not self._newest:
                raise _SupersededError

        try:
            prediction = self._segment(preview, None if preview else check)
        except _SupersededError:
            return {"ready": False, "why": "another request arrived."}
        return {
            "ready": True,
            "preview": self._is_preview,
            **shown_result(prediction, [PALETTE[i % len(PALETTE)] for i in range(len(self.names))]),
            "notes": list(dict.fromkeys([*self.live.notes, *prediction.notes])),
        }

    def _apply(self, content: Mapping[str, Any]) -> bool:
        """Set names and scribbles; return whether they have changed."""
        window, revision = content.get("window"), content.get("revision")
        # a window may send two requests before the first response, so its own changes do not conflict
        if window != self._window and revision != self.revision:
            raise StaleWindow("the scribbles were changed in another window. Reload this page to get them.")
        number = self.images.checked_number(content.get("image", self.shown))
        item = self.images[number]
        earlier = self.names, listed(item.strokes)
        names = checked_names(content.get("names"))
        strokes = checked_strokes(content.get("strokes"), len(names), item.page, item.image.shape)
        self.images.check_classes(names, item)
        # the result is that of the image shown
        self.prediction = self.prediction if number == self.shown else None
        self.names, self.shown = names, number
        # an equal list is not replaced, because cached labels belong to the list object
        if earlier[1] != listed(strokes):
            item.strokes = strokes
        changed = earlier != (names, listed(strokes))
        if changed:
            self.revision += 1
            self._window = window if isinstance(window, str) else None
        self.saved = self.saved and not changed
        return changed

    def _segment(self, preview: bool = False, step: Callable[[float], None] | None = None) -> Prediction:
        self.prediction = self.images.segment(self.images[self.shown], self.names, preview, step)
        self._is_preview = self.live.model.classifier.kind != self.live.kind
        return self.prediction

    def save(self, content: Mapping[str, Any] | None = None) -> list[str]:
        """Write the files of the session as `SavedFiles.write`; return their names.

        Args:
            content: names and scribbles as in `update`, which may be newer than the last result; None for the current.

        Raises:
            InputError: no scribble yet, or a file exists that this window has not written.
        """
        with self._lock:
            changed = content is not None and self._apply(content)
            is_missing = self.prediction is None and len(self.images) > 1
            if changed or is_missing or (self.prediction is not None and self._is_preview):
                self.prediction = None
                if self.images.has_two_classes():
                    self._segment()
            model = None if self.prediction is None else self.live.model
            names = self._files.write(self.images, model, self._label_map)
            self.saved = True
            return names

    def _label_map(self, item: PaintedImage) -> np.ndarray:
        """Return the label map of an image by the current model."""
        if item is self.images[self.shown] and self.prediction is not None:
            return self.prediction.labels
        return self.images.label_map(item)
