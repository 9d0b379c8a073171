"""Paint session: scribbles, classes and results of the pages of one or several images, independent of the server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vispe.errors import InputError, is_integer
from vispe.images.labels.stroke_pixels import Stroke
from vispe.images.read import Micrograph
from vispe.images.write import write_labels
from vispe.segment.classify.pixel_classifier import KINDS
from vispe.segment.features.pixel_features import FeatureConfig
from vispe.segment.live.labelled_pages import MAX_CLASSES
from vispe.segment.live.live_segmentation import Live
from vispe.segment.live.paint.checks import checked_names, checked_strokes
from vispe.segment.live.paint.painted_image import PaintedImage, listed, png_text, shown_png
from vispe.segment.model.model_file import save_model
from vispe.segment.overlays import PALETTE, Color
from vispe.segment.run.run_state import common_channel_count
from vispe.segment.types import Prediction
from vispe.utils.files import check_writable, write_json

MODEL = "model.vispe"
"""Name of the model file."""


class StaleWindow(InputError):
    """Scribbles from a window that is unaware of changes in another window."""


class _SupersededError(Exception):
    """A newer request arrived while a result was computed."""


class Paint:
    """Pages with their scribbles and results, and the classes that they share.

    One classifier is trained on the scribbles of all images. The window shows one image; `image`, `page`, `live`,
    `strokes` and `prediction` are those of this image.

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
        self.out, self.force, self.shown = out, force, 0
        live = Live(image, page=page, features=features, classifier=classifier, seed=seed, device=device)
        self.images = [PaintedImage(image, page, live), *(PaintedImage(*each) for each in more)]
        self._check_images()
        self.names = checked_names(names or ("background", "object"))
        self.prediction: Prediction | None = None
        self.saved = True
        self.revision = 0
        self._window: str | None = None  # identifier of the window that sent the scribbles
        self._written: set[Path] = set()
        self._lock = threading.Lock()
        self._is_preview = False  # whether the result is that of the preview classifier
        self._newest: object = None  # identifies the newest request

    def _check_images(self) -> None:
        """Raise InputError if images cannot share a model or a folder, or if a page does not exist."""
        stems: dict[str, Path] = {}
        for item in self.images:
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
        common_channel_count({item.image.path: item.image.channels for item in self.images}, "images")

    @property
    def image(self) -> Micrograph:
        """The image shown."""
        return self.images[self.shown].image

    @property
    def page(self) -> int:
        """The page shown, from 0."""
        return self.images[self.shown].page

    @property
    def live(self) -> Live:
        """Session of the image shown."""
        return self._session(self.images[self.shown])

    @property
    def strokes(self) -> list[Stroke]:
        """Scribbles of the image shown."""
        return self.images[self.shown].strokes

    @property
    def colors(self) -> list[Color]:
        """Colour of each class."""
        return [PALETTE[i % len(PALETTE)] for i in range(len(self.names))]

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
        item = self.images[self.shown if number is None else self._checked_number(number)]
        if item.live is None:
            # a new session selects its page in the shared feature cache
            with self._lock:
                self._session(item)
        return shown_png(self._session(item))

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
            number = self._checked_number(content.get("show"))
            if self._take(content) or number != self.shown:
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
            'ready', whether there is a result: 'labels' and 'uncertainty' as PNGs in base64, 'fractions' of the label
            map, 'preview', whether the classifier of the session differs from that of the result, and 'notes'; else
            'why', the reason. For a browser window also 'revision'. A result that is not a preview is abandoned if
            another request arrives.

        Raises:
            InputError, OptionError: invalid scribbles or names.
            StaleWindow: another window has changed the scribbles since `revision`.
        """
        request = self._newest = object()
        with self._lock:
            self._take(content)
            answer = self._answer(request, content.get("preview") is True)
            return answer | ({"revision": self.revision} if "window" in content else {})

    def _answer(self, request: object, preview: bool) -> dict[str, Any]:
        """Segment the page again, and return the result of `update`."""
        self.prediction = None
        if not self._has_two_classes():
            return {"ready": False, "why": "paint scribbles of at least two classes."}

        def check(fraction: float) -> None:
            if request is not self._newest:
                raise _SupersededError

        try:
            prediction = self._segment(preview, None if preview else check)
        except _SupersededError:
            return {"ready": False, "why": "another request arrived."}
        return {"ready": True, "preview": self._is_preview, **self._shown(prediction)}

    def _take(self, content: Mapping[str, Any]) -> bool:
        """Set names and scribbles; return whether they have changed."""
        window, revision = content.get("window"), content.get("revision")
        # a window may send two requests before the first response, so its own changes do not conflict
        if window != self._window and revision != self.revision:
            raise StaleWindow("the scribbles were changed in another window. Reload this page to get them.")
        number = self._checked_number(content.get("image", self.shown))
        item = self.images[number]
        earlier = self.names, listed(item.strokes)
        names = checked_names(content.get("names"))
        strokes = checked_strokes(content.get("strokes"), len(names), item.page, item.image.shape)
        for other in self.images:
            if other is not item and any(stroke.level[0] > len(names) for stroke in other.strokes):
                raise InputError(
                    f"names={', '.join(names)} are fewer than the classes of the scribbles on {other.image.path.name}. "
                    "Erase these scribbles first."
                )
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
        live, sessions = self.live, []
        for item in self.images:
            if item.live is not None or item.strokes:
                sessions.append(self._session(item))
                item.draw(sessions[-1])
        live.select_page(self.page)
        live.names = tuple(self.names)
        if len(sessions) > 1:
            live.fit(preview, sessions)
        else:
            live.fit(preview)
        self.prediction = live.predict(step=step)
        self._is_preview = live.model.classifier.kind != live.kind
        return self.prediction

    def _session(self, item: PaintedImage) -> Live:
        """Return the session of an image; it is created when the image is needed for the first time."""
        if item.live is None:
            first = self.images[0].live
            assert first is not None
            item.live = first.for_image(item.image, item.page)
        return item.live

    def _has_two_classes(self) -> bool:
        """Return whether pixels of two classes are labelled; a scribble covered by another one has no pixel."""
        return len(frozenset[int]().union(*(item.classes() for item in self.images))) > 1

    def _checked_number(self, number: Any) -> int:
        """Validate the index of an image."""
        if not is_integer(number) or not 0 <= number < len(self.images):
            raise InputError(
                f"image {str(number)[:20]} does not exist; there are images 0 to {len(self.images) - 1}."
            )
        return int(number)

    def labels(self) -> np.ndarray:
        """Return the labels (h, w) uint8 of the image shown, later scribbles over earlier ones, 0 = none."""
        return self.images[self.shown].labels()

    def save(self, content: Mapping[str, Any] | None = None) -> list[str]:
        """Write the scribbles, and, if there is a result, the model and the label maps; return the file names.

        Each image with scribbles has a file of them, and each image that was shown has a label map. A file of
        scribbles that this session wrote is removed if the image has no scribbles any more.

        Args:
            content: names and scribbles as in `update`, which may be newer than the last result; None for the current.

        Raises:
            InputError: no scribble yet, or a file exists that this window has not written.
        """
        with self._lock:
            changed = content is not None and self._take(content)
            is_missing = self.prediction is None and len(self.images) > 1
            if changed or is_missing or (self.prediction is not None and self._is_preview):
                self.prediction = None
                if self._has_two_classes():
                    self._segment()
            painted = [item for item in self.images if item.strokes]
            if not painted:
                raise InputError("there is nothing to save yet. Paint a scribble first.")
            paths = self._files(painted)
            unwritten = [path for path in paths if path not in self._written]
            inputs = [item.image.path for item in self.images if item.image.path.is_file()]
            check_writable(unwritten, self.force, protect=inputs)
            self.out.mkdir(parents=True, exist_ok=True)
            # record each file at once: it may be overwritten later, even if the next one fails
            for item in painted:
                write_json(item.scribble_file(self.out), listed(item.strokes), force=True)
                self._written.add(item.scribble_file(self.out))
            if self.prediction is not None:
                save_model(self.out / MODEL, self.live.model, True)
                self._written.add(self.out / MODEL)
                for item in self._segmented():
                    write_labels(
                        item.label_file(self.out), self._labels_of(item)[None], item.single_page(), True
                    )
                    self._written.add(item.label_file(self.out))
            for item in self.images:
                stale = item.scribble_file(self.out)
                if not item.strokes and stale in self._written:
                    stale.unlink(missing_ok=True)
                    self._written.discard(stale)
            self.saved = True
            return [path.name for path in paths]

    def _segmented(self) -> list[PaintedImage]:
        """Return the images that were shown, which have a session."""
        return [item for item in self.images if item.live is not None]

    def _labels_of(self, item: PaintedImage) -> np.ndarray:
        """Return the label map of an image by the current model."""
        if item is self.images[self.shown] and self.prediction is not None:
            return self.prediction.labels
        live = self._session(item)
        live.select_page(item.page)
        return live.predict().labels

    def _files(self, painted: Sequence[PaintedImage]) -> list[Path]:
        """Return the files that `save` writes; without a result, only the scribbles."""
        scribbles = [item.scribble_file(self.out) for item in painted]
        if self.prediction is None:
            return scribbles
        return [*scribbles, self.out / MODEL, *(item.label_file(self.out) for item in self._segmented())]

    def _shown(self, prediction: Prediction) -> dict[str, Any]:
        counts = np.bincount(prediction.labels.ravel(), minlength=len(self.names) + 1)[1:]
        total = max(int(counts.sum()), 1)
        palette = Image.fromarray(prediction.labels)
        palette.putpalette([0, 0, 0, *(int(v) for color in self.colors for v in color)])
        uncertainty = np.nan_to_num(prediction.uncertainty * 255).round().astype(np.uint8)
        return {
            "labels": png_text(palette, Image.Resampling.NEAREST, transparency=0),
            "uncertainty": png_text(Image.fromarray(uncertainty), Image.Resampling.BOX),
            "fractions": [int(n) / total for n in counts],
            "notes": list(dict.fromkeys([*self.live.notes, *prediction.notes])),
        }
