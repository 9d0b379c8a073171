"""Interactive segmentation engine: the features of one page are computed once and cached.

Features take seconds and do not depend on labels. After a change of the scribbles, only the classifier is
fitted again, on the cached features of the labelled pixels, and applied to the cached features of the page.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from vispe.errors import InputError, OptionError, counted
from vispe.images.read import Micrograph
from vispe.segment.classify.pixel_classifier import FASTEST, PixelClassifier
from vispe.segment.features.feature_cache import MEMORY
from vispe.segment.features.feature_config import FeatureConfig
from vispe.segment.live.labelled_pages import LabelledPages
from vispe.segment.live.live_settings import LiveSettings
from vispe.segment.live.live_training import Domains, train_model
from vispe.segment.model.model_file import Model, save_model
from vispe.segment.model.prediction import predict_page
from vispe.segment.overlays import Color
from vispe.segment.run.inputs import check_channels
from vispe.segment.run.out_of_distribution import pixel_size_warning
from vispe.segment.types import PostProcessing, Prediction, ReadOptions


class Live(LabelledPages):
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
        settings = LiveSettings.of(model, features, classifier, reading, seed)
        self._watch, self._loaded = watch, settings.model
        if settings.model is not None:
            names, colors = names or settings.model.names, colors or settings.model.colors
            check_channels(image.path, image.channels, settings.model)
        self.kind, self.post, self._seed = settings.classifier, post or PostProcessing(), settings.seed
        self.names: tuple[str, ...] = tuple(names)
        self.colors = None if colors is None else tuple(colors)
        self._reading, self._features = settings.reading, settings.extractor(device, memory)
        self._model = self._loaded
        # sessions of several images share this dictionary of at most one entry
        self._domains: Domains = {}
        self._open(image, page)

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

    def restore_model(self) -> None:
        """Use the model passed to the constructor again, if any."""
        self._model = self._loaded

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

    @property
    def preview_kind(self) -> str:
        """Kind of classifier of a preview: `logistic` for `ensemble`, otherwise that of the session."""
        return FASTEST if self.kind == "ensemble" else self.kind

    def fit(self, preview: bool = False, sessions: Sequence[Live] = ()) -> Model:
        """Train on all current labels.

        Args:
            preview: train a classifier of `preview_kind`, which answers faster; if that is not the kind of the session,
                its probabilities are not calibrated.
            sessions: the sessions of several images (see `for_image`), including this one, in the order of the images:
                one model is trained on the labels of all, and all predict with it. Empty: only this session.

        Raises:
            InputError: duplicate names, or fewer than 2 labelled classes.
        """
        sessions = sessions or [self]
        kind = self.preview_kind if preview else self.kind
        model = train_model(
            sessions, self._features, kind, self.names, self.colors, self._reading, self._seed, self._domains,
            calibrated=kind == self.kind,
        )  # fmt: skip
        for session in sessions:
            session.names, session._model = model.names, model
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
            self._features.apply(page, valid, classifier.linear if is_linear else None)
            on_step = step or (lambda fraction: None)
            return predict_page(page, valid, self._features, classifier, self.post, on_step)

        return self.within(work)

    def save(self, path: str | Path, force: bool = False) -> Path:
        """Write the model file for `vispe apply`.

        Raises:
            InputError: no model yet, or `path` exists and not `force`.
        """
        return save_model(path, self.model, force)
