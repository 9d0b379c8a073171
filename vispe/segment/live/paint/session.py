"""Paint session: scribbles, classes and the result of one page, independent of the server."""

from __future__ import annotations

import base64
import io
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vispe.errors import InputError, OptionError, counted, is_integer
from vispe.images.labels.class_values import LONGEST, has_controls
from vispe.images.labels.scribbles import WIDEST, Stroke, check_work, stroke_pixels
from vispe.images.read import Micrograph
from vispe.images.write import write_labels
from vispe.segment.classify.pixel_classifier import KINDS
from vispe.segment.features.pixel_features import FeatureConfig
from vispe.segment.live.live_segmentation import MAX_CLASSES, Live
from vispe.segment.model.model_file import save_model
from vispe.segment.overlays import PALETTE, Color
from vispe.segment.types import Prediction
from vispe.utils.files import check_writable, write_json

SIDE = 2048
"""Largest side in pixels of the image sent to the window; scribbles are in pixels of the original image."""

_POINTS = 200_000  # upper bound of the points of all scribbles


class StaleWindow(InputError):
    """Scribbles from a window that is unaware of changes in another window."""


class _SupersededError(Exception):
    """A newer request arrived while a result was computed."""


class Paint:
    """One page with its scribbles and result.

    Args:
        image: the image.
        page: its page, from 0.
        out: folder for saved files.
        names: initial class names.
        features: features of a pixel; None for those of `vispe segment`.
        classifier: `'ensemble'`, `'logistic'`, `'forest'` or `'boosting'`.
        seed: seed of all random numbers.
        device: device of the features.
        force: overwrite existing files.

    Raises:
        OptionError: fewer than two names, duplicate names, or too many.
        InputError: the page does not exist.
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
    ) -> None:
        self.image, self.page, self.out, self.force = image, page, out, force
        self.live = Live(image, page=page, features=features, classifier=classifier, seed=seed, device=device)
        self.names = checked_names(names or ("background", "object"))
        self.strokes: list[Stroke] = []
        self.prediction: Prediction | None = None
        self.saved = True
        self.revision = 0
        self._window: str | None = None  # identifier of the window that sent the scribbles
        self._written: set[Path] = set()
        self._lock = threading.Lock()
        self._is_preview = False  # whether the result is that of the preview classifier
        self._newest: object = None  # identifies the newest request

    @property
    def colors(self) -> list[Color]:
        """Colour of each class."""
        return [PALETTE[i % len(PALETTE)] for i in range(len(self.names))]

    def state(self) -> dict[str, Any]:
        """Return the initial state of the window, JSON-able."""
        height, width = self.image.shape
        return {
            "title": self.image.path.name,
            "width": width,
            "height": height,
            "page": self.page,
            "pages": self.image.n_pages,
            "most": MAX_CLASSES,
            "palette": [list(map(int, color)) for color in PALETTE],
            "names": self.names,
            "saved": self.saved,
            "revision": self.revision,
            "strokes": self._listed(),
            "files": [path.name for path in self._files().values()],
            "folder": str(self.out),
        }

    def image_png(self) -> bytes:
        """Return the page as shown in the window, a PNG of at most `SIDE` pixels."""
        grey, valid = self.live.normalized()
        pixels = (np.where(valid[..., None], np.nan_to_num(grey), 0) * 255).round().astype(np.uint8)
        # other numbers of channels are shown as their mean, as in overlays
        pixels = pixels if pixels.shape[2] == 3 else pixels.mean(2).round().astype(np.uint8)
        return _png(_fitting(Image.fromarray(pixels), Image.Resampling.BOX))

    def update(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Set scribbles and classes, and segment the page again.

        Args:
            content: 'names', and 'strokes', a list of 'class' (from 1), 'width' and 'points'. A browser window adds
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
        labels = self.labels()
        # a scribble may be covered by another one, and then has no label
        if len(np.unique(labels[labels > 0])) < 2:
            return {"ready": False, "why": "paint scribbles of at least two classes."}

        def check(fraction: float) -> None:
            if request is not self._newest:
                raise _SupersededError

        try:
            prediction = self._segment(labels, preview, None if preview else check)
        except _SupersededError:
            return {"ready": False, "why": "another request arrived."}
        return {"ready": True, "preview": self._is_preview, **self._shown(prediction)}

    def _take(self, content: Mapping[str, Any]) -> bool:
        """Set names and scribbles; return whether they have changed."""
        window, revision = content.get("window"), content.get("revision")
        # a window may send two requests before the first response, so its own changes do not conflict
        if window != self._window and revision != self.revision:
            raise StaleWindow("the scribbles were changed in another window. Reload this page to get them.")
        earlier = self.names, self._listed()
        names = checked_names(content.get("names"))
        strokes = checked_strokes(content.get("strokes"), len(names), self.page, self.image.shape)
        self.names, self.strokes = names, strokes
        changed = earlier != (names, self._listed())
        if changed:
            self.revision += 1
            self._window = window if isinstance(window, str) else None
        self.saved = self.saved and not changed
        return changed

    def _segment(
        self, labels: np.ndarray, preview: bool = False, step: Callable[[float], None] | None = None
    ) -> Prediction:
        self.live.names = tuple(self.names)
        self.live.draw(labels)
        self.live.fit(preview)
        self.prediction = self.live.predict(step=step)
        self._is_preview = self.live.model.classifier.kind != self.live.kind
        return self.prediction

    def labels(self) -> np.ndarray:
        """Return the labels (h, w) uint8 of the scribbles, later ones over earlier ones, 0 = none."""
        h, w = self.image.shape
        labels = np.zeros((h, w), np.uint8)
        for stroke in self.strokes:
            labels[stroke_pixels(stroke, h, w)] = int(stroke.level[0])
        return labels

    def save(self, content: Mapping[str, Any] | None = None) -> list[str]:
        """Write the scribbles, and, if there is a result, the model and the label map; return the file names.

        Args:
            content: names and scribbles as in `update`, which may be newer than the last result; None for the current.

        Raises:
            InputError: no scribble yet, or a file exists that this window has not written.
        """
        with self._lock:
            changed = content is not None and self._take(content)
            if changed or (self.prediction is not None and self._is_preview):
                self.prediction, labels = None, self.labels()
                if len(np.unique(labels[labels > 0])) > 1:
                    self._segment(labels)
            if not self.strokes:
                raise InputError("there is nothing to save yet. Paint a scribble first.")
            files = self._files()
            if self.prediction is None:
                files = {"strokes": files["strokes"]}
            unwritten = [path for path in files.values() if path not in self._written]
            check_writable(
                unwritten, self.force, protect=[self.image.path] if self.image.path.is_file() else []
            )
            self.out.mkdir(parents=True, exist_ok=True)
            # record each file at once: it may be overwritten later, even if the next one fails
            write_json(files["strokes"], self._listed(), force=True)
            self._written.add(files["strokes"])
            if self.prediction is not None:
                save_model(files["model"], self.live.model, True)
                self._written.add(files["model"])
                page = self.image.pages[self.page : self.page + 1]
                page_image = Micrograph(self.image.path, page, self.image.pixel_size, self.image.resolution)
                write_labels(files["labels"], self.prediction.labels[None], page_image, True)
                self._written.add(files["labels"])
            self.saved = True
            return [path.name for path in files.values()]

    def _files(self) -> dict[str, Path]:
        stem = self.image.path.stem
        names = {"strokes": f"{stem}_strokes.json", "model": "model.vispe", "labels": f"{stem}_seg.png"}
        return {kind: self.out / name for kind, name in names.items()}

    def _listed(self) -> list[dict[str, Any]]:
        """Return the scribbles in the format of the labels of `vispe segment`."""
        return [
            {
                "class": int(s.level[0]),
                "width": s.width,
                "points": np.round(s.points, 2).tolist(),
                "page": s.page,
            }
            for s in self.strokes
        ]

    def _shown(self, prediction: Prediction) -> dict[str, Any]:
        counts = np.bincount(prediction.labels.ravel(), minlength=len(self.names) + 1)[1:]
        total = max(int(counts.sum()), 1)
        palette = Image.fromarray(prediction.labels)
        palette.putpalette([0, 0, 0, *(int(v) for color in self.colors for v in color)])
        uncertainty = np.nan_to_num(prediction.uncertainty * 255).round().astype(np.uint8)
        return {
            "labels": _text(palette, Image.Resampling.NEAREST, transparency=0),
            "uncertainty": _text(Image.fromarray(uncertainty), Image.Resampling.BOX),
            "fractions": [int(n) / total for n in counts],
            "notes": list(dict.fromkeys([*self.live.notes, *prediction.notes])),
        }


def checked_names(names: Any) -> list[str]:
    """Validate class names.

    Raises:
        OptionError: not a list of 2 to `MAX_CLASSES` distinct names, or a name that model files do not allow.
    """
    is_list = isinstance(names, Sequence) and not isinstance(names, str)
    if not is_list or not all(isinstance(n, str) and n.strip() for n in names):
        raise OptionError(f"names={str(names)[:80]} must be a list of names.")
    stripped = [n.strip() for n in names]
    for name in stripped:
        if len(name) > LONGEST or has_controls(name):
            raise OptionError(
                f"names={name[:40]!a}... must have up to {LONGEST} characters without control characters, got "
                f"{len(name)}. Rename the class."
            )
    if not 2 <= len(stripped) <= MAX_CLASSES or len(set(stripped)) < len(stripped):
        raise OptionError(
            f"names={', '.join(stripped)} must be 2 to {MAX_CLASSES} distinct names. Use other names."
        )
    return stripped


def checked_strokes(content: Any, count: int, page: int, shape: tuple[int, int]) -> list[Stroke]:
    """Validate the scribbles sent by the window.

    Raises:
        InputError: not a list of scribbles, a class that does not exist, or a point outside the image.
    """
    if not isinstance(content, list):
        raise InputError("strokes must be a list.")
    scribbles, total = [], 0
    for number, entry in enumerate(content):
        entry = entry if isinstance(entry, dict) else {}
        level, width = entry.get("class"), entry.get("width")
        if (
            not is_integer(level)
            or not 1 <= level <= count
            or not is_integer(width)
            or not 1 <= width <= WIDEST
        ):
            raise InputError(f"scribble {number} has class={level!r} and width={width!r}. Paint it again.")
        try:
            points = np.array(entry.get("points"), np.float64)
        except (TypeError, ValueError) as error:
            raise InputError(f"scribble {number} has non-numeric points. Paint it again.") from error
        if points.ndim != 2 or points.shape[1] != 2 or not len(points) or not np.isfinite(points).all():
            raise InputError(f"scribble {number} has points that are not [x, y] pairs. Paint it again.")
        # use the rounded points of the saved file
        points = points.round(2)
        if ((points < -0.5) | (points >= (shape[1] - 0.5, shape[0] - 0.5))).any():
            raise InputError(f"scribble {number} has points outside the image. Paint it again.")
        total += len(points)
        scribbles.append(Stroke((int(level),), int(width), points, page))
    if total > _POINTS:
        raise InputError(f"the scribbles have {counted(total, 'point')}, more than {_POINTS}. Undo some.")
    check_work("the window", scribbles, *shape)
    return scribbles


def _fitting(image: Image.Image, resampling: Image.Resampling) -> Image.Image:
    """Downscale an image to at most `SIDE` pixels."""
    scale = SIDE / max(image.size)
    if scale >= 1:
        return image
    return image.resize((max(round(image.width * scale), 1), max(round(image.height * scale), 1)), resampling)


def _png(image: Image.Image, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG", compress_level=1, **options)
    return out.getvalue()


def _text(image: Image.Image, resampling: Image.Resampling, **options: Any) -> str:
    return base64.b64encode(_png(_fitting(image, resampling), **options)).decode()
