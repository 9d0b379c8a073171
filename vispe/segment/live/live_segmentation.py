"""Interactive segmentation engine: the features of one page are computed once and cached.

Features take seconds and do not depend on labels. After a change of the scribbles, only the classifier is
fitted again, on the cached features of the labelled pixels, and applied to the cached features of the page.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from vispe.backbones.hub import downloads
from vispe.errors import InputError, OptionError, ShapeError, counted
from vispe.images.normalize import normalize
from vispe.images.read import Micrograph
from vispe.segment.classify.calibration import concatenate_ids, label_scribbles
from vispe.segment.classify.classifier_fit import learn
from vispe.segment.classify.out_of_distribution import FeatureDistribution
from vispe.segment.classify.pixel_classifier import FASTEST, KINDS, PixelClassifier
from vispe.segment.features.feature_cache import MEMORY, CachedFeatures
from vispe.segment.features.pixel_features import FeatureConfig
from vispe.segment.features.sample_grid import Sample, sample
from vispe.segment.model.model_file import Model, load_model, save_model
from vispe.segment.model.prediction import predict_page, within_memory
from vispe.segment.overlays import Color
from vispe.segment.pipeline import DEFAULT, ReadOptions
from vispe.segment.run.inputs import BatchImage, use_stored_features
from vispe.segment.run.out_of_distribution import pixel_size_range, pixel_size_warning, summarize_pages
from vispe.segment.types import PostProcessing, Prediction

MAX_CLASSES = 20
"""Upper bound of the number of classes; more are treated as an error, such as instance labels."""


class Live:
    """Segments one image again whenever its labels change.

    The result is that of `vispe segment` with the same labels, features, classifier and reading: the same code gathers
    bitwise identical features, fits the same classifier and predicts the same tiles. Only the contribution of filters
    to the scores of `logistic` is summed over the page instead of tile by tile, so probabilities agree within 1e-5. One
    difference is intended: label values are class numbers, and are not ranked.

    Memory: features of a grey image take 104 bytes per pixel for 26 filters and about 30 to 80 for the maps of
    vispe_micro at stride 2, more if its tiles overlap more; three channels take three times the filters.
    The normalised pages of a stack are cached as well. Only `logistic` answers while you paint: trees classify every
    pixel again, which takes seconds. `fit(preview=True)` trains `logistic` for a first answer of the `ensemble`.

    Args:
        image: the image; `micrograph` creates one from an array.
        page: index (from 0) of the page of a stack whose features are cached.
        features: features of a pixel; None: `vispe.segment.pipeline.DEFAULT`.
        classifier: `'ensemble'`, `'logistic'`, `'forest'` or `'boosting'`; None: `'ensemble'`, as in `vispe segment`.
        names: class names; classes without a name are named class 1, class 2, ...
        colors: (r, g, b) of each class for the model file; None: the default palette.
        model: an earlier model, or its file, which is used for predictions at once; later updates use its features,
            normalisation, names, colours, seed and kind of classifier (the default, if it was trained without labels).
        reading: normalisation; channel, page and axes have no effect on an image that is already read.
        post: post-processing of the result.
        seed: seed of all random numbers.
        device: `'auto'`, `'cpu'`, `'cuda'` ...
        memory: memory limit of the features in bytes.
        watch: called with each message for the user.

    Raises:
        OptionError: a name is unknown, or an option is set that `model` determines.
        InputError: the model does not match the image, or the page does not exist.

    Example:
        >>> from vispe.segment.live.array_image import micrograph
        >>> grey = np.repeat([[50.0, 200.0]], 32, 0).repeat(24, 1)
        >>> labels = np.zeros(grey.shape, int)
        >>> labels[4:8, 4:8], labels[4:8, 40:44] = 1, 2
        >>> live = Live(micrograph(grey), features=FeatureConfig(sigmas=(1.0,)))
        >>> live.update(labels).labels[0, [0, -1]].tolist()
        [1, 2]
    """

    def __init__(
        self,
        image: Micrograph,
        *,
        page: int = 0,
        features: FeatureConfig | None = None,
        classifier: str | None = None,
        names: Sequence[str] = (),
        colors: Sequence[Color] | None = None,
        model: Model | str | Path | None = None,
        reading: ReadOptions | None = None,
        post: PostProcessing | None = None,
        seed: int | None = None,
        device: str = "auto",
        memory: int = MEMORY,
        watch: Callable[[str], None] | None = None,
    ) -> None:
        self._loaded = load_model(model) if isinstance(model, str | Path) else model
        if self._loaded is not None:
            arguments = {"features": features, "classifier": classifier, "reading": reading, "seed": seed}
            conflicts = [name for name, value in arguments.items() if value is not None]
            if conflicts:
                raise OptionError(
                    f"{', '.join(conflicts)} cannot be combined with a model, which determines it."
                )
            features, seed = _pixel_features(self._loaded), self._loaded.seed
            classifier = self._loaded.classifier.kind
            classifier = classifier if classifier in KINDS else KINDS[0]
            reading = ReadOptions(normalize=self._loaded.normalize, clip=self._loaded.clip)
            names, colors = names or self._loaded.names, colors or self._loaded.colors
            _check_channels(image, self._loaded)
        self._watch = watch
        self.kind, self.post, self._seed = classifier or KINDS[0], post or PostProcessing(), seed or 0
        PixelClassifier(self.kind, 2)  # validates the name early
        self.names: tuple[str, ...] = tuple(names)
        self.colors = None if colors is None else tuple(colors)
        if (features or DEFAULT).filters_3d:
            raise OptionError(
                "filters_3d needs neighbouring pages, but a live session uses a single page. Omit it, or use vispe "
                "segment and vispe apply."
            )
        self._reading = reading or ReadOptions()
        basis = self._loaded.basis if self._loaded is not None else None
        config = features or DEFAULT
        with downloads(self._loaded is None or config.model in (None, DEFAULT.model)):
            self._features = CachedFeatures(config, seed=self._seed, device=device, basis=basis)
        self._features.memory = memory
        self._model = self._loaded
        # sessions of several images share this dictionary of at most one entry
        self._known: dict[tuple[object, ...], FeatureDistribution | None] = {}
        self._open(image, page)

    def _open(self, image: Micrograph, page: int) -> None:
        """Normalise the image, and reset everything that belongs to an image."""
        self.image, self.notes = image, list[str]()
        pages, notes = normalize(image, self._reading.normalize, self._reading.clip)
        self._pages = list(pages)  # one array object per page: the feature cache compares by identity
        for note in (*image.notes, *image.exclusions, *notes):
            self._note(note)
        self._drawn: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._found: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._found_with = self._settings()
        self._fitted_to: tuple[int, ...] = ()
        self.page = -1
        self.select_page(page)

    def for_image(self, image: Micrograph, page: int = 0) -> Live:
        """Return a session of another image with the same settings, which shares the feature extractor.

        Pass the sessions of all images to `fit`, and call `select_page` before predicting another image than the last
        one. The features of images remain cached, as far as `memory` permits.

        Raises:
            InputError: the images differ in their number of channels, or the page does not exist.
            OptionError: features that are fitted to the labelled pages, which sessions cannot share.
        """
        if self._features.learns:
            raise OptionError(
                f"sessions of several images cannot share features={self._features.config.model}, which are fitted to "
                "the labelled pages. Use vispe_micro or filters."
            )
        if image.channels != self.image.channels:
            raise InputError(
                f"{image.path} has {counted(image.channels, 'channel')}, but {self.image.path} has "
                f"{self.image.channels}. Select channels with channel."
            )
        self._features.retain = True
        other = copy.copy(self)
        other._open(image, page)
        return other

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
        own = replace(reading, normalize=self._reading.normalize, clip=self._reading.clip)
        files = [images] if isinstance(images, BatchImage) else images
        use_stored_features(self._features, folder, files, own)

    @property
    def model(self) -> Model:
        """Model of the last update, or the one passed to the constructor; usable by `vispe apply`.

        Raises:
            InputError: no model yet.
        """
        if self._model is None:
            raise InputError("there is no model yet. Label at least 2 classes, or load a model file.")
        return self._model

    @property
    def ready(self) -> bool:
        """Whether a model is available for prediction."""
        return self._model is not None

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
        self._within(lambda: self._features.prepare(self._pages[self.page], self.image.valid[self.page]))

    def update(self, labels: np.ndarray, page: int | None = None) -> Prediction:
        """Train on the labels and predict the cached page.

        Args:
            labels: integers, 0 = unlabelled, 1..K; (h, w) for one page, or (z, h, w) for all of them. Earlier labels
                of other pages remain valid.
            page: page of labels (h, w); None: the cached one.

        Raises:
            ShapeError: another size than the image.
            InputError: not integers, more than `MAX_CLASSES` classes, or fewer than 2 classes labelled on data.
        """
        self.draw(labels, page)
        self.fit()
        return self.predict()

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

    @property
    def preview_kind(self) -> str:
        """Kind of classifier of a preview: `logistic` for `ensemble`, otherwise that of the session."""
        return FASTEST if self.kind == "ensemble" else self.kind

    def fit(self, preview: bool = False, sessions: Sequence[Live] = ()) -> Model:
        """Train on all current labels.

        Args:
            preview: train a classifier of `preview_kind`, which answers faster.
            sessions: the sessions of several images (see `for_image`), including this one, in the order of the images:
                one model is trained on the labels of all, and all predict with it. Empty: only this session.

        Raises:
            InputError: duplicate names, or fewer than 2 labelled classes.
        """
        sessions = sessions or [self]
        labelled = {session: pages for session in sessions if (pages := session._labelled())}
        class_parts = [page_classes for pages in labelled.values() for _, page_classes in pages.values()]
        classes = np.concatenate(class_parts) if class_parts else np.zeros(0, np.int64)
        count = max(len(self.names), int(classes.max(initial=0)))
        names = self.names + tuple(f"class {k + 1}" for k in range(len(self.names), count))
        duplicates = sorted({name for name in names if names.count(name) > 1})
        if duplicates:
            raise InputError(f"two classes are named {duplicates[0]!r}. Use distinct names.")
        if len(np.unique(classes)) < 2:
            empty = np.zeros((len(classes), 1), np.float32)
            PixelClassifier(self.kind, max(count, 2)).fit(
                empty, classes, names
            )  # raises an error that lists the labelled classes
        scribble_ids = concatenate_ids(
            [
                label_scribbles(indices, page_classes, session.image.shape)
                for session, pages in labelled.items()
                for indices, page_classes in pages.values()
            ]
        )
        classifier, facts = learn(
            self.preview_kind if preview else self.kind,
            names,
            self._gather_all(labelled),
            classes,
            scribble_ids,
            self._seed,
            self._features.filter_scale(self.image.channels),
        )
        pages = [(session, page) for session, pages in labelled.items() for page in pages]
        files = [str(session.image.path) for session in labelled]
        notes = {"images": files, "pages": [page for _, page in pages], **facts}
        pixel_size = pixel_size_range([session.image.pixel_size for session in labelled])
        if pixel_size is not None:
            notes["pixel_size_um"] = pixel_size
        model = Model.of(
            self._features,
            self._reading,
            classifier=classifier,
            names=names,
            colors=None if self.colors is None or len(self.colors) < count else self.colors[:count],
            channels=self.image.channels,
            seed=self._seed,
            notes=notes,
            domain=self._domain(pages),
        )
        for session in sessions:
            session.names, session._model = names, model
        return model

    def predict(self, page: int | None = None, step: Callable[[float], None] | None = None) -> Prediction:
        """Predict a page with the current model; a note warns if its pixel size differs from that of the labels.

        Args:
            page: index of the page; None for the cached page, which is fast.
            step: called with the fraction of the page that each piece covers.

        Raises:
            InputError: no model yet.
        """
        number = self._page(page)
        prediction = self.segment(self._pages[number], self.image.valid[number], step)
        sizes = pixel_size_warning(self.image.path.name, self.model, self.image.pixel_size)
        return replace(prediction, notes=(*prediction.notes, *sizes))

    def segment(
        self, page: np.ndarray, valid: np.ndarray, step: Callable[[float], None] | None = None
    ) -> Prediction:
        """Predict any page of the same kind, such as the rotated image.

        Args:
            page: (h, w, c) float32 grey levels, normalised.
            valid: (h, w) bool, pixels with data.
            step: see `predict`.
        """
        classifier = self.model.classifier

        def work() -> Prediction:
            is_linear = isinstance(classifier, PixelClassifier) and classifier.is_linear
            linear = classifier.linear if is_linear else None
            self._features.apply(page, valid, linear)
            on_step = step or (lambda fraction: None)
            return predict_page(page, valid, self._features, classifier, self.post, on_step)

        return self._within(work)

    def drawn(self) -> np.ndarray:
        """Return the flat indices y * width + x (n,) of the labelled pixels of the cached page, ascending."""
        return self._drawn.get(self.page, (np.zeros(0, np.int64),))[0]

    def gather(self, indices: np.ndarray) -> np.ndarray:
        """Return the features (n, f) of pixels of the cached page, by ascending flat indices."""
        return self._within(lambda: self._look_up(self.page, indices))

    def normalized(self, page: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return the grey levels (h, w, c) in [0, 1] of a page and its mask of pixels with data (h, w)."""
        number = self._page(page)
        return self._pages[number], self.image.valid[number]

    def save(self, path: str | Path, force: bool = False) -> Path:
        """Write the model file for `vispe apply`.

        Raises:
            InputError: no model yet, or `path` exists and not `force`.
        """
        return save_model(path, self.model, force)

    def _labelled(self) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """Return the flat indices and classes of the labelled pixels of each page that has any, in page order."""
        return {page: drawn for page, drawn in sorted(self._drawn.items()) if len(drawn[0])}

    def _domain(self, pages: Sequence[tuple[Live, int]]) -> FeatureDistribution | None:
        """Summarise the features of the labelled pages; cached until the set of pages changes."""
        key = (*pages, self._features.tile, self._features.basis)
        if key in self._known:
            return self._known[key]

        def sample_page(session_page: tuple[Live, int], most: int) -> Sample | None:
            session, page = session_page
            grey, valid = session.normalized(page)
            return session._within(lambda: sample(self._features.prepare(grey, valid), valid, most))

        domain = summarize_pages(pages, sample_page)
        self._known.clear()
        self._known[key] = domain
        return domain

    def _settings(self) -> tuple[object, ...]:
        """Return what the values of features depend on, and what changes when memory runs out."""
        return self._features.tile, self._features.device

    def _gather_all(self, labelled: dict[Live, dict[int, tuple[np.ndarray, np.ndarray]]]) -> np.ndarray:
        """Return the features (n, f) of the labelled pixels of all sessions."""
        settings = self._settings()
        features = [session._gather(pages) for session, pages in labelled.items()]
        # memory ran out in one session, which changes the features of all
        if self._settings() != settings:
            return self._gather_all(labelled)
        return np.concatenate(features)

    def _gather(self, labelled: dict[int, tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
        """Return the features (n, f) of all labelled pixels; those of unchanged pages are cached."""
        if self._found_with != self._settings():
            self._found.clear()
            self._found_with = self._settings()
        if self._features.config.kind != "filters" and self._fitted_to != tuple(labelled):
            pages = [(self._pages[page], self.image.valid[page]) for page in labelled]
            earlier_basis = self._features.basis
            self._within(lambda: self._features.fit(pages))
            # a new basis changes the features of all pages
            if self._features.basis is not earlier_basis:
                self._found.clear()
            self._fitted_to = tuple(labelled)
        for page in [page for page in self._found if page not in labelled]:
            del self._found[page]
        for page, (indices, _) in labelled.items():
            cached = self._found.get(page)
            if cached is None or not np.array_equal(cached[0], indices):
                self._found[page] = (
                    indices,
                    self._within(lambda p=page, at_indices=indices: self._look_up(p, at_indices)),
                )
        if len(self._found) < len(labelled):  # memory ran out, and features changed with the smaller tiles
            return self._gather(labelled)
        return np.concatenate([self._found[page][1] for page in labelled])

    def _look_up(self, page: int, indices: np.ndarray) -> np.ndarray:
        return self._features.prepare(self._pages[page], self.image.valid[page]).gather_indices(indices)

    def _within(self, work: Callable[[], Any]) -> Any:
        settings = self._settings()
        result = within_memory(self._features, work, self._note)
        if settings != self._settings():  # features depend on the tiles
            self._found.clear()
            self._found_with = self._settings()
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


def _pixel_features(model: Model) -> FeatureConfig:
    """Return the features of a model; InputError for a text model, which cannot learn from labels."""
    if not isinstance(model.features, FeatureConfig):
        raise InputError(
            "the model classifies by text prompts and cannot learn from labels. Use vispe apply."
        )
    return model.features


def _check_channels(image: Micrograph, model: Model) -> None:
    """Raise InputError if the image and the training images differ in their number of channels."""
    if model.channels not in (None, image.channels):
        raise InputError(
            f"{image.path} has {counted(image.channels, 'channel')}, but the model was trained with {model.channels}. "
            "Select other channels or another model."
        )
