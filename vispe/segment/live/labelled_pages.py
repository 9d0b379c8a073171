"""Pages of an image with their labels, and the features of the labelled pixels, which are cached."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from vispe.errors import InputError, ShapeError, counted
from vispe.images.normalize import normalize
from vispe.images.read import Micrograph
from vispe.segment.features.feature_cache import CachedFeatures
from vispe.segment.model.prediction import within_memory
from vispe.segment.run.inputs import BatchImage
from vispe.segment.run.stored_inputs import use_stored_features
from vispe.segment.types import ReadOptions

MAX_CLASSES = 20
"""Upper bound of the number of classes; more are treated as an error, such as instance labels."""

Pixels = tuple[np.ndarray, np.ndarray]
"""Flat indices y * width + x (n,) of labelled pixels, ascending, and their classes (n,)."""


class LabelledPages:
    """Normalised pages of one image, their labels, and the features of the labelled pixels.

    Attributes:
        image: the image.
        page: the page whose features are cached completely.
        notes: messages for the user.
    """

    image: Micrograph
    page: int
    notes: list[str]
    _features: CachedFeatures
    _reading: ReadOptions
    _watch: Callable[[str], None] | None

    def _open(self, image: Micrograph, page: int) -> None:
        """Normalise the image, and reset everything that belongs to an image."""
        self.image, self.notes = image, list[str]()
        pages, notes = normalize(image, self._reading.normalize, self._reading.clip)
        self._pages = list(pages)  # one array object per page: the feature cache compares by identity
        for note in (*image.notes, *image.exclusions, *notes):
            self._note(note)
        self._drawn: dict[int, Pixels] = {}
        self._gathered: dict[
            int, tuple[np.ndarray, np.ndarray]
        ] = {}  # indices and features of labelled pixels
        self._gathered_with = self.settings()
        self._fitted_to: tuple[int, ...] = ()
        self.page = -1
        self.select_page(page)

    def use_stored_features(
        self, folder: str | Path, images: BatchImage | Sequence[BatchImage], reading: ReadOptions
    ) -> None:
        """Read the model outputs of `vispe.segment.pipeline.store_features` instead of computing them.

        Args:
            folder: folder of the outputs.
            images: the image file with its mask and axes, or those of all sessions that share the extractor.
            reading: how it was read; normalisation is that of the session.

        Raises:
            OptionError: features without a model.
            InputError: features are missing, or of another image, model, version or reading.
        """
        read_options = replace(reading, normalize=self._reading.normalize, clip=self._reading.clip)
        use_stored_features(
            self._features, folder, [images] if isinstance(images, BatchImage) else images, read_options
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the cached features and the normalised pages."""
        return self._features.nbytes + sum(page.nbytes for page in self._pages)

    def select_page(self, page: int) -> None:
        """Select another page for the feature cache; its features are computed on demand.

        Raises:
            InputError: no such page.
        """
        if not 0 <= page < self.image.n_pages:
            raise InputError(
                f"page {page} does not exist in {self.image.path}, which has pages 0 to {self.image.n_pages - 1}."
            )
        self.page = page
        self._features.keep(self._pages[page])

    def compute(self) -> None:
        """Compute the features of the page, unless they are cached or the basis of tokens is not fitted yet.

        Raises:
            InputError: they exceed the memory limit.
        """
        self.within(lambda: self._features.prepare(self._pages[self.page], self.image.valid[self.page]))

    def draw(self, labels: np.ndarray, page: int | None = None) -> None:
        """Set labels as `update` does, without training.

        Raises:
            ShapeError: labels have another shape than the page or the stack.
            InputError: labels are not integers, or outside of 0 to `MAX_CLASSES`.
        """
        labels = np.asarray(labels)
        z, h, w = self.image.pages.shape[:3]
        if labels.shape not in ((h, w), (z, h, w)) or (labels.ndim == 3 and page is not None):
            raise ShapeError(
                f"labels must be {h} x {w} for one page or {z} x {h} x {w} for all, got shape {labels.shape}."
            )
        if labels.dtype.kind not in "uib":
            raise InputError(f"labels must be integers, 0 = unlabelled, got {labels.dtype}.")
        for number, page_labels in enumerate(labels) if labels.ndim == 3 else [(self._page(page), labels)]:
            indices = np.flatnonzero(page_labels)
            classes = page_labels.ravel()[indices].astype(np.int64)
            if classes.size and not 1 <= classes.min() <= classes.max() <= MAX_CLASSES:
                raise InputError(
                    f"labels must be 1 to {MAX_CLASSES}, 0 = unlabelled, got {classes.min()} to {classes.max()}. "
                    "Label classes instead of objects."
                )
            data = self.image.valid[number].ravel()[indices]
            if not data.all():
                ignored = int((~data).sum())
                verbs = "has no data and is" if ignored == 1 else "have no data and are"
                self._note(f"{counted(ignored, 'labelled pixel')} of page {number} {verbs} ignored.")
            self._drawn[number] = indices[data], classes[data]

    def drawn(self) -> np.ndarray:
        """Return the flat indices y * width + x (n,) of the labelled pixels of the cached page, ascending."""
        return self._drawn.get(self.page, (np.zeros(0, np.int64),))[0]

    def gather(self, indices: np.ndarray) -> np.ndarray:
        """Return the features (n, f) of pixels of the cached page, by ascending flat indices."""
        return self.within(lambda: self._look_up(self.page, indices))

    def normalized(self, page: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return the grey levels (h, w, c) in [0, 1] of a page and its mask of pixels with data (h, w)."""
        number = self._page(page)
        return self._pages[number], self.image.valid[number]

    def labelled(self) -> dict[int, Pixels]:
        """Return the flat indices and classes of the labelled pixels of each page that has any, in page order."""
        return {page: pixels for page, pixels in sorted(self._drawn.items()) if len(pixels[0])}

    def settings(self) -> tuple[object, ...]:
        """Return what the values of features depend on, and what changes when memory runs out."""
        return self._features.tile, self._features.device

    def gather_labelled(self, labelled: dict[int, Pixels]) -> np.ndarray:
        """Return the features (n, f) of all labelled pixels; those of unchanged pages are cached."""
        if self._gathered_with != self.settings():
            self._gathered.clear()
            self._gathered_with = self.settings()
        if self._features.config.kind != "filters" and self._fitted_to != tuple(labelled):
            pages = [(self._pages[page], self.image.valid[page]) for page in labelled]
            earlier_basis = self._features.basis
            self.within(lambda: self._features.fit(pages))
            # a new basis changes the features of all pages
            if self._features.basis is not earlier_basis:
                self._gathered.clear()
            self._fitted_to = tuple(labelled)
        for page in [page for page in self._gathered if page not in labelled]:
            del self._gathered[page]
        for page, (indices, _) in labelled.items():
            cached = self._gathered.get(page)
            if cached is None:
                features = self.within(lambda p=page, at_indices=indices: self._look_up(p, at_indices))
                self._gathered[page] = indices, features
            elif not np.array_equal(cached[0], indices):
                self._gathered[page] = indices, self._look_up_new(page, indices, *cached)
        if len(self._gathered) < len(labelled):  # memory ran out, and features changed with the smaller tiles
            return self.gather_labelled(labelled)
        return np.concatenate([self._gathered[page][1] for page in labelled])

    def _look_up_new(
        self, page: int, indices: np.ndarray, earlier: np.ndarray, values: np.ndarray
    ) -> np.ndarray:
        """Return the features (n, f) of pixels; those of `earlier` pixels, which are `values`, are copied."""
        known = np.isin(indices, earlier, assume_unique=True)
        out = np.empty((len(indices), values.shape[1]), values.dtype)
        out[known] = values[np.searchsorted(earlier, indices[known])]
        if not known.all():
            settings = self.settings()
            out[~known] = self.within(lambda: self._look_up(page, indices[~known]))
            if settings != self.settings():  # memory ran out, and features changed with the smaller tiles
                return self.within(lambda: self._look_up(page, indices))
        return out

    def _look_up(self, page: int, indices: np.ndarray) -> np.ndarray:
        return self._features.prepare(self._pages[page], self.image.valid[page]).gather_indices(indices)

    def within(self, work: Callable[[], Any]) -> Any:
        """Run `work`, again with smaller tiles when memory runs out; cached features of other tiles are dropped."""
        settings = self.settings()
        result = within_memory(self._features, work, self._note)
        if settings != self.settings():  # features depend on the tiles
            self._gathered.clear()
            self._gathered_with = self.settings()
        return result

    def _page(self, page: int | None) -> int:
        number = self.page if page is None else page
        if not 0 <= number < self.image.n_pages:
            raise InputError(f"page {number} does not exist; the image has {self.image.n_pages}.")
        return number

    def _note(self, text: str) -> None:
        """Record and announce a note once."""
        if text not in self.notes:
            self.notes.append(text)
            if self._watch is not None:
                self._watch(text)
