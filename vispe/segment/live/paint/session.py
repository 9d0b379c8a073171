"""What the window shows and saves: strokes, classes and the result of one page, without any network."""

from __future__ import annotations

import base64
import io
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vispe.errors import InputError, OptionError, is_whole
from vispe.files import check_writable, write_json
from vispe.images.labels.class_values import LONGEST, has_controls
from vispe.images.labels.scribbles import WIDEST, Stroke, check_work, stroke_pixels
from vispe.images.read import Micrograph
from vispe.images.write import write_labels
from vispe.segment.features.pixel_features import FeatureConfig
from vispe.segment.live.live_segmentation import MAX_CLASSES, Live
from vispe.segment.model.model_file import save_model
from vispe.segment.overlays import PALETTE, Color
from vispe.segment.run.prediction import Prediction

SIDE = 2048
"""Pixels of a picture that the window gets at most; strokes are kept in pixels of the image."""

_POINTS = 200_000  # of all strokes together


class StaleWindow(InputError):
    """Strokes from a window that has not seen those of another window."""


class Paint:
    """One page, its strokes, and what follows from them.

    Args:
        image: the image.
        page: which of its pages, from 0.
        out: folder for what is saved.
        names: classes to begin with.
        features: what a pixel is described by; None for those of `vispe segment`.
        classifier: `'logistic'`, `'forest'` or `'boosting'`.
        seed: of all random numbers.
        device: where features are computed.
        force: replace files that exist.

    Raises:
        OptionError: fewer than two names, two that are equal, or too many.
        InputError: the page is not there.
    """

    def __init__(
        self,
        image: Micrograph,
        page: int,
        out: Path,
        *,
        names: Sequence[str] = (),
        features: FeatureConfig | None = None,
        classifier: str = "logistic",
        seed: int = 0,
        device: str = "auto",
        force: bool = False,
    ) -> None:
        self.image, self.page, self.out, self.force = image, page, out, force
        self.live = Live(image, page=page, features=features, classifier=classifier, seed=seed, device=device)
        self.names = checked_names(names or ("background", "object"))
        self.strokes: list[Stroke] = []
        self.found: Prediction | None = None
        self.saved = True
        self.revision = 0
        self._window: str | None = None  # whose strokes these are
        self._written: set[Path] = set()
        self._lock = threading.Lock()

    @property
    def colors(self) -> list[Color]:
        """The colour of each class."""
        return [PALETTE[i % len(PALETTE)] for i in range(len(self.names))]

    def state(self) -> dict[str, Any]:
        """Return what the window needs when it opens; JSON-able."""
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

    def picture(self) -> bytes:
        """Return the page as the window shows it, a PNG of `SIDE` pixels at most."""
        grey, valid = self.live.normalized()
        shown = (np.where(valid[..., None], np.nan_to_num(grey), 0) * 255).round().astype(np.uint8)
        # of other numbers of channels the mean is shown, as on overlays
        shown = shown if shown.shape[2] == 3 else shown.mean(2).round().astype(np.uint8)
        return _png(_fitting(Image.fromarray(shown), Image.Resampling.BOX))

    def update(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Take over strokes and classes, and segment the page again.

        Args:
            content: 'names', and 'strokes' as a list of 'class' (from 1), 'width' and 'points'. A browser window adds
                'window', its own random name, and 'revision', the last one that it has seen.

        Returns:
            'ready', whether there is a result: 'labels' and 'uncertainty' as PNGs in base64, 'fractions' of the label
            map, and 'notes'; else 'why' in a sentence. For a browser window also 'revision'.

        Raises:
            InputError, OptionError: what is no list of strokes or names.
            StaleWindow: another window has changed the strokes since `revision`.
        """
        with self._lock:
            self._take(content)
            answer = self._answer()
            return answer | ({"revision": self.revision} if "window" in content else {})

    def _answer(self) -> dict[str, Any]:
        """Segment the page again, and return what `update` returns."""
        self.found = None
        labels = self.labels()
        # a stroke may lie under another one, and then says nothing
        if len(np.unique(labels[labels > 0])) < 2:
            return {"ready": False, "why": "paint strokes of two classes or more."}
        self._segment(labels)
        found = self.found
        return (
            {"ready": False, "why": "no result."} if found is None else {"ready": True, **self._shown(found)}
        )

    def _take(self, content: Mapping[str, Any]) -> bool:
        """Take over names and strokes; return whether they are others than before."""
        window, revision = content.get("window"), content.get("revision")
        # a window may send twice before it gets an answer, so its own changes do not count
        if window != self._window and revision != self.revision:
            raise StaleWindow(
                "the strokes were changed in another window; reload this page to get them, then paint here."
            )
        before = self.names, self._listed()
        names = checked_names(content.get("names"))
        strokes = checked_strokes(content.get("strokes"), len(names), self.page, self.image.shape)
        self.names, self.strokes = names, strokes
        changed = before != (names, self._listed())
        if changed:
            self.revision += 1
            self._window = window if isinstance(window, str) else None
        self.saved = self.saved and not changed
        return changed

    def _segment(self, labels: np.ndarray) -> None:
        self.live.names = tuple(self.names)
        self.live.draw(labels)
        self.live.fit()
        self.found = self.live.predict()

    def labels(self) -> np.ndarray:
        """Return the pixels under the strokes (h, w) uint8, later ones over earlier ones, 0 = none."""
        h, w = self.image.shape
        labels = np.zeros((h, w), np.uint8)
        for stroke in self.strokes:
            labels[stroke_pixels(stroke, h, w)] = int(stroke.level[0])
        return labels

    def save(self, content: Mapping[str, Any] | None = None) -> list[str]:
        """Write strokes, and once there is a result the model and the label map; return the names of the files.

        Args:
            content: names and strokes as in `update`, which may be newer than the last result; None for those of it.

        Raises:
            InputError: no stroke yet, or a file exists that this window has not written.
        """
        with self._lock:
            if content is not None and self._take(content):
                self.found, labels = None, self.labels()
                if len(np.unique(labels[labels > 0])) > 1:
                    self._segment(labels)
            if not self.strokes:
                raise InputError("there is nothing to save yet; paint a stroke first.")
            files = self._files()
            if self.found is None:
                files = {"strokes": files["strokes"]}
            new = [path for path in files.values() if path not in self._written]
            check_writable(new, self.force, protect=[self.image.path] if self.image.path.is_file() else [])
            self.out.mkdir(parents=True, exist_ok=True)
            # a file that is written belongs to this window, even if the next one fails
            write_json(files["strokes"], self._listed(), force=True)
            self._written.add(files["strokes"])
            if self.found is not None:
                save_model(files["model"], self.live.model, True)
                self._written.add(files["model"])
                page = self.image.pages[self.page : self.page + 1]
                one = Micrograph(self.image.path, page, self.image.pixel_size, self.image.resolution)
                write_labels(files["labels"], self.found.labels[None], one, True)
                self._written.add(files["labels"])
            self.saved = True
            return [path.name for path in files.values()]

    def _files(self) -> dict[str, Path]:
        stem = self.image.path.stem
        names = {"strokes": f"{stem}_strokes.json", "model": "model.vispe", "labels": f"{stem}_seg.png"}
        return {kind: self.out / name for kind, name in names.items()}

    def _listed(self) -> list[dict[str, Any]]:
        """Return the strokes as `vispe segment --labels` reads them."""
        return [
            {
                "class": int(s.level[0]),
                "width": s.width,
                "points": np.round(s.points, 2).tolist(),
                "page": s.page,
            }
            for s in self.strokes
        ]

    def _shown(self, found: Prediction) -> dict[str, Any]:
        counts = np.bincount(found.labels.ravel(), minlength=len(self.names) + 1)[1:]
        total = max(int(counts.sum()), 1)
        palette = Image.fromarray(found.labels)
        palette.putpalette([0, 0, 0, *(int(v) for color in self.colors for v in color)])
        unsure = np.nan_to_num(found.uncertainty * 255).round().astype(np.uint8)
        return {
            "labels": _text(palette, Image.Resampling.NEAREST, transparency=0),
            "uncertainty": _text(Image.fromarray(unsure), Image.Resampling.BOX),
            "fractions": [int(n) / total for n in counts],
            "notes": list(dict.fromkeys([*self.live.notes, *found.notes])),
        }


def checked_names(names: Any) -> list[str]:
    """Return names of classes.

    Raises:
        OptionError: no list of at least two names that differ, at most `MAX_CLASSES`; a name that a model file
            cannot hold.
    """
    good = isinstance(names, Sequence) and not isinstance(names, str)
    if not good or not all(isinstance(n, str) and n.strip() for n in names):
        raise OptionError(f"names={str(names)[:80]} must be a list of words.")
    given = [n.strip() for n in names]
    for name in given:
        if len(name) > LONGEST or has_controls(name):
            raise OptionError(
                f"names={name[:40]!a}... must have up to {LONGEST} characters without control characters, got "
                f"{len(name)}; rename the class."
            )
    if not 2 <= len(given) <= MAX_CLASSES or len(set(given)) < len(given):
        raise OptionError(
            f"names={', '.join(given)} must be 2 to {MAX_CLASSES} words, each once; give other names."
        )
    return given


def checked_strokes(content: Any, count: int, page: int, shape: tuple[int, int]) -> list[Stroke]:
    """Return the strokes that the window sent.

    Raises:
        InputError: what is no list of strokes, a class that is not there, a point far outside.
    """
    if not isinstance(content, list):
        raise InputError("strokes must be a list.")
    found, total = [], 0
    for number, entry in enumerate(content):
        entry = entry if isinstance(entry, dict) else {}
        level, width = entry.get("class"), entry.get("width")
        if not is_whole(level) or not 1 <= level <= count or not is_whole(width) or not 1 <= width <= WIDEST:
            raise InputError(f"stroke {number} has class={level!r} and width={width!r}; paint it again.")
        try:
            points = np.array(entry.get("points"), np.float64)
        except (TypeError, ValueError) as error:
            raise InputError(f"stroke {number} has points that are no numbers; paint it again.") from error
        if points.ndim != 2 or points.shape[1] != 2 or not len(points) or not np.isfinite(points).all():
            raise InputError(f"stroke {number} has points that are no [x, y] pairs; paint it again.")
        # what is painted is what the file will hold
        points = points.round(2)
        if ((points < -0.5) | (points >= (shape[1] - 0.5, shape[0] - 0.5))).any():
            raise InputError(f"stroke {number} has points outside the picture; paint it again.")
        total += len(points)
        found.append(Stroke((int(level),), int(width), points, page))
    if total > _POINTS:
        raise InputError(f"the strokes have {total} points, more than {_POINTS}; undo some.")
    check_work("the window", found, *shape)
    return found


def _fitting(image: Image.Image, how: Image.Resampling) -> Image.Image:
    """Return a picture of `SIDE` pixels at most."""
    share = SIDE / max(image.size)
    if share >= 1:
        return image
    return image.resize((max(round(image.width * share), 1), max(round(image.height * share), 1)), how)


def _png(image: Image.Image, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG", compress_level=1, **options)
    return out.getvalue()


def _text(image: Image.Image, how: Image.Resampling, **options: Any) -> str:
    return base64.b64encode(_png(_fitting(image, how), **options)).decode()
