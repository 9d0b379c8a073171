"""Segmentation that follows a drawing as it changes: the features of one page are computed once and kept.

Features cost seconds and do not depend on labels. What is left for a changed scribble is to look up the features of
the labelled pixels, to fit the classifier and to apply it to what is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vispe.backbones.hub import downloads
from vispe.errors import InputError, OptionError, ShapeError
from vispe.images.normalize import normalize
from vispe.images.read import Micrograph
from vispe.segment.classify.calibration import joined, strokes
from vispe.segment.classify.classifier_fit import learn
from vispe.segment.classify.out_of_distribution import Domain
from vispe.segment.classify.pixel_classifier import KINDS, PixelClassifier
from vispe.segment.features.feature_cache import MEMORY, KeptFeatures
from vispe.segment.features.pixel_features import FeatureConfig
from vispe.segment.features.sample_grid import Sample, sample
from vispe.segment.model.model_file import Model, load_model, save_model
from vispe.segment.overlays import Color
from vispe.segment.pipeline import DEFAULT, Reading
from vispe.segment.run.out_of_distribution import learn_pages
from vispe.segment.run.prediction import Post, Prediction, predict_page, within_memory

MAX_CLASSES = 20
"""More classes than this are taken for a mistake, such as numbers of objects."""


class Live:
    """Segments one image again whenever its labels have changed.

    The result is that of `vispe segment` with the same labels, features, classifier and reading: the same code gathers
    the same features to the last bit, fits the same classifier and predicts the same tiles. Only the share of filters
    in the scores of `logistic` is summed over the page and not tile by tile, so probabilities agree within 1e-5. One
    difference is meant: numbers of labels are classes as they stand, and are not ranked.

    Memory: features of a grey image take 104 bytes a pixel for 26 filters and about 30 to 80 for the maps of
    vispe_micro at every second pixel, more where its tiles overlap more; three channels take three times the filters.
    The normalised pages of a stack are kept, too. Forests and boosting classify every pixel anew and are not fast.

    Args:
        image: the image; `micrograph` makes one of an array.
        page: of a stack, the page whose features are kept, from 0.
        features: what a pixel is described by; None: `vispe.segment.pipeline.DEFAULT`.
        classifier: `'logistic'`, `'forest'` or `'boosting'`; None: `'logistic'`.
        names: class names; classes beyond them are called class 1, class 2, ...
        colors: (r, g, b) of each class for the model file; None: the palette of vispe.
        model: an earlier model, or its file. It predicts at once; its features, normalisation, names, colours, seed and
            kind of classifier (logistic, if it came from no labels) are those of later updates, too.
        reading: normalisation; the choices of channel, page and axes have no effect on an image that is read already.
        post: smoothing of the result.
        seed: of all random numbers.
        device: `'auto'`, `'cpu'`, `'cuda'` ...
        memory: bytes that the features may take.
        watch: called with each thing that the user should know.

    Raises:
        OptionError: an unknown name, or an option beside `model` that the model decides.
        InputError: a model that does not fit the image, a page that is not there.
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
        reading: Reading | None = None,
        post: Post | None = None,
        seed: int | None = None,
        device: str = "auto",
        memory: int = MEMORY,
        watch: Callable[[str], None] | None = None,
    ) -> None:
        self._loaded = load_model(model) if isinstance(model, str | Path) else model
        if self._loaded is not None:
            given = {"features": features, "classifier": classifier, "reading": reading, "seed": seed}
            twice = [name for name, value in given.items() if value is not None]
            if twice:
                raise OptionError(f"{', '.join(twice)} cannot be given beside a model, which decides it.")
            features, seed = _pixel_features(self._loaded), self._loaded.seed
            classifier = self._loaded.classifier.kind
            classifier = classifier if classifier in KINDS else KINDS[0]
            reading = Reading(normalize=self._loaded.normalize, clip=self._loaded.clip)
            names, colors = names or self._loaded.names, colors or self._loaded.colors
            _check_channels(image, self._loaded)
        self.image, self._watch, self.notes = image, watch, list[str]()
        self.kind, self.post, self._seed = classifier or KINDS[0], post or Post(), seed or 0
        PixelClassifier(self.kind, 2)  # the name is checked before any work
        self.names: tuple[str, ...] = tuple(names)
        self.colors = None if colors is None else tuple(colors)
        if (features or DEFAULT).filters_3d:
            raise OptionError(
                "filters_3d reads the neighbours of a page, but only one page is kept here; leave it out, or use vispe "
                "segment and vispe apply."
            )
        self._reading = reading or Reading()
        basis = self._loaded.basis if self._loaded is not None else None
        config = features or DEFAULT
        with downloads(self._loaded is None or config.model in (None, DEFAULT.model)):
            self._features = KeptFeatures(config, seed=self._seed, device=device, basis=basis)
        self._features.memory = memory
        pages, notes = normalize(image, self._reading.normalize, self._reading.clip)
        self._pages = list(pages)  # one array object for each page, by which it is known
        for note in (*image.notes, *image.exclusions, *notes):
            self._note(note)
        self._model = self._loaded
        self._drawn: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._found: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._fitted_to: tuple[int, ...] = ()
        self._known: tuple[tuple[object, ...], Domain | None] = (), None
        self.page = -1
        self.turn_to(page)

    @property
    def model(self) -> Model:
        """The model of the last update, or the one that was given; `vispe apply` can use it.

        Raises:
            InputError: there is none yet.
        """
        if self._model is None:
            raise InputError("there is no model yet; label at least 2 classes, or load a model file.")
        return self._model

    @property
    def ready(self) -> bool:
        """Whether there is a model to predict with."""
        return self._model is not None

    @property
    def nbytes(self) -> int:
        """Bytes that are kept: features, and the normalised pages."""
        return self._features.nbytes + sum(page.nbytes for page in self._pages)

    def turn_to(self, page: int) -> None:
        """Keep the features of another page from now on; they are computed when they are needed.

        Raises:
            InputError: there is no such page.
        """
        if not 0 <= page < self.image.n_pages:
            raise InputError(
                f"page {page} is not in {self.image.path}; it has {self.image.n_pages} (0 to {self.image.n_pages - 1})."
            )
        self.page = page
        self._features.keep(self._pages[page])

    def compute(self) -> None:
        """Compute the features of the page, unless they are there or no basis for tokens is known yet.

        Raises:
            InputError: they need more memory than allowed.
        """
        self._within(lambda: self._features.prepare(self._pages[self.page], self.image.valid[self.page]))

    def update(self, labels: np.ndarray, page: int | None = None) -> Prediction:
        """Train on the labels and predict the page whose features are kept.

        Args:
            labels: integers, 0 = unlabelled, 1..K; (h, w) for one page, or (z, h, w) for all of them. The labels that
                were given for other pages count as before.
            page: which page (h, w) belongs to; None: the one whose features are kept.

        Raises:
            ShapeError: another size than the image.
            InputError: no integers, more than `MAX_CLASSES`, or fewer than 2 classes that are labelled on data.
        """
        self.draw(labels, page)
        self.fit()
        return self.predict()

    def draw(self, labels: np.ndarray, page: int | None = None) -> None:
        """Take over labels as `update` does, without training."""
        labels = np.asarray(labels)
        z, h, w = self.image.pages.shape[:3]
        if labels.shape not in ((h, w), (z, h, w)) or (labels.ndim == 3 and page is not None):
            raise ShapeError(
                f"labels must be {h} x {w} for one page or {z} x {h} x {w} for all, got shape {labels.shape}."
            )
        if labels.dtype.kind not in "uib":
            raise InputError(f"labels must be integers, 0 = unlabelled, got {labels.dtype}.")
        for number, part in enumerate(labels) if labels.ndim == 3 else [(self._page(page), labels)]:
            places = np.flatnonzero(part)
            classes = part.ravel()[places].astype(np.int64)
            if classes.size and not 1 <= classes.min() <= classes.max() <= MAX_CLASSES:
                raise InputError(
                    f"labels must be 1 to {MAX_CLASSES}, 0 = unlabelled, found {classes.min()} to {classes.max()}; "
                    "number the classes, not the objects."
                )
            data = self.image.valid[number].ravel()[places]
            if not data.all():
                self._note(f"{(~data).sum()} labelled pixels of page {number} hold no data and are not used.")
            self._drawn[number] = places[data], classes[data]

    def fit(self) -> Model:
        """Train on all labels that were given."""
        drawn = {page: found for page, found in sorted(self._drawn.items()) if len(found[0])}
        classes = np.concatenate([found[1] for found in drawn.values()]) if drawn else np.zeros(0, np.int64)
        count = max(len(self.names), int(classes.max(initial=0)))
        names = self.names + tuple(f"class {k + 1}" for k in range(len(self.names), count))
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise InputError(f"two classes are called {twice[0]!r}; give each a name of its own.")
        if len(np.unique(classes)) < 2:
            empty = np.zeros((len(classes), 1), np.float32)
            PixelClassifier(self.kind, max(count, 2)).fit(empty, classes, names)  # says what is missing
        shape = self.image.pages.shape[1:3]
        of = joined([strokes(places, own, shape) for places, own in drawn.values()])
        classifier, facts = learn(self.kind, names, self._gather(drawn), classes, of, self._seed)
        notes = {"images": [str(self.image.path)], "pages": list(drawn), **facts}
        self.names = names
        self._model = Model.of(
            self._features,
            self._reading,
            classifier=classifier,
            names=names,
            colors=None if self.colors is None or len(self.colors) < count else self.colors[:count],
            channels=self.image.channels,
            seed=self._seed,
            notes=notes,
            domain=self._domain(list(drawn)),
        )
        return self._model

    def predict(self, page: int | None = None, step: Callable[[float], None] | None = None) -> Prediction:
        """Predict a page with the model there is.

        Args:
            page: None: the one whose features are kept, the only quick one.
            step: called with the share of the page that each piece is.
        """
        number = self._page(page)
        return self.segment(self._pages[number], self.image.valid[number], step)

    def segment(
        self, page: np.ndarray, valid: np.ndarray, step: Callable[[float], None] | None = None
    ) -> Prediction:
        """Predict any page of the same kind, such as the image turned.

        Args:
            page: (h, w, c) float32 grey levels, normalised.
            valid: (h, w) bool, pixels with data.
            step: as in `predict`.
        """
        classifier = self.model.classifier

        def work() -> Prediction:
            linear = classifier.linear if isinstance(classifier, PixelClassifier) else None
            self._features.apply(page, valid, linear)
            shown = step or (lambda share: None)
            return predict_page(page, valid, self._features, classifier, self.post, shown)

        return self._within(work)

    def drawn(self) -> np.ndarray:
        """Return the labelled places y * width + x (n,) of the page whose features are kept, ascending."""
        return self._drawn.get(self.page, (np.zeros(0, np.int64),))[0]

    def gather(self, places: np.ndarray) -> np.ndarray:
        """Return the features (n, f) of places of the page whose features are kept, ascending."""
        return self._within(lambda: self._look_up(self.page, places))

    def normalized(self, page: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return the grey levels (h, w, c) in [0, 1] of a page and its pixels with data (h, w)."""
        number = self._page(page)
        return self._pages[number], self.image.valid[number]

    def save(self, path: str | Path, force: bool = False) -> Path:
        """Write the model file that `vispe apply` reads.

        Raises:
            InputError: no model yet, or `path` exists and not `force`.
        """
        return save_model(path, self.model, force)

    def _domain(self, pages: Sequence[int]) -> Domain | None:
        """Summarise what the labelled pages look like, anew where there are others than before."""
        key = (*pages, self._features.tile, self._features.basis)
        if key == self._known[0]:
            return self._known[1]

        def one(page: int, most: int) -> Sample | None:
            valid = self.image.valid[page]
            return self._within(lambda: sample(self._features.prepare(self._pages[page], valid), valid, most))

        self._known = key, learn_pages(pages, one)
        return self._known[1]

    def _gather(self, drawn: dict[int, tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
        """Return the features (n, f) of all labelled pixels; those that did not change come from memory."""
        if self._features.config.kind != "filters" and self._fitted_to != tuple(drawn):
            pages = [(self._pages[page], self.image.valid[page]) for page in drawn]
            before = self._features.basis
            self._within(lambda: self._features.fit(pages))
            if self._features.basis is not before:
                self._found.clear()
            self._fitted_to = tuple(drawn)
        for page in [page for page in self._found if page not in drawn]:
            del self._found[page]
        for page, (places, _) in drawn.items():
            known = self._found.get(page)
            if known is None or not np.array_equal(known[0], places):
                self._found[page] = places, self._within(lambda p=page, at=places: self._look_up(p, at))
        if len(self._found) < len(drawn):  # memory ran out on the way, and tiles are smaller now
            return self._gather(drawn)
        return np.concatenate([self._found[page][1] for page in drawn])

    def _look_up(self, page: int, places: np.ndarray) -> np.ndarray:
        return self._features.prepare(self._pages[page], self.image.valid[page]).gather_places(places)

    def _within(self, work: Callable[[], Any]) -> Any:
        before = self._features.tile, self._features.device
        found = within_memory(self._features, work, self._note)
        if before != (self._features.tile, self._features.device):  # other tiles give other features
            self._found.clear()
        return found

    def _page(self, page: int | None) -> int:
        number = self.page if page is None else page
        if not 0 <= number < self.image.n_pages:
            raise InputError(f"page {number} is not there; the image has {self.image.n_pages}.")
        return number

    def _note(self, text: str) -> None:
        """Keep and announce something once."""
        if text not in self.notes:
            self.notes.append(text)
            if self._watch is not None:
                self._watch(text)


def micrograph(array: np.ndarray, axes: str | None = None, name: str = "image") -> Micrograph:
    """Make an image of an array.

    Args:
        array: grey levels of any number type but complex; bool becomes 0 and 255.
        axes: a letter for each dimension: Y and X, C for channels, every other one counts pages. None: 'YX' for two
            dimensions.
        name: what messages call it.

    Raises:
        ShapeError: axes that do not fit the array, or an array without pixels.
        InputError: an array that holds no numbers, or no data.
    """
    array = np.asarray(array)
    axes = "YX" if axes is None else axes.upper()
    if (
        len(axes) != array.ndim
        or len(set(axes)) != len(axes)
        or not {"Y", "X"} <= set(axes)
        or not array.size
    ):
        raise ShapeError(
            f"axes={axes} need one letter, with Y and X, for each dimension of shape {array.shape}."
        )
    if array.dtype.kind not in "buif":
        raise InputError(f"{name} holds {array.dtype} and no grey levels; convert it to numbers.")
    if array.dtype.kind == "b":
        array = array.astype(np.uint8) * np.uint8(255)
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    order = [axes.index(a) for a in axes if a not in "YXC"] + [axes.index(a) for a in "YXC" if a in axes]
    pages = array.transpose(order)
    pages = pages if "C" in axes else pages[..., None]
    image = Micrograph(Path(name), np.ascontiguousarray(pages.reshape(-1, *pages.shape[-3:])))
    if not image.valid.any():
        raise InputError(f"{name} holds no data: all pixels are NaN or infinite.")
    return image


def _pixel_features(model: Model) -> FeatureConfig:
    """Return the features of a model, or say that they are none that labels could be put on."""
    if not isinstance(model.features, FeatureConfig):
        raise InputError("the model finds classes by words and cannot learn from labels; use vispe apply.")
    return model.features


def _check_channels(image: Micrograph, model: Model) -> None:
    """Refuse a model of images with other channels."""
    if model.channels not in (None, image.channels):
        raise InputError(
            f"{image.path} has {image.channels} channel(s), but the model was trained with {model.channels}; "
            "choose other channels or another model."
        )
