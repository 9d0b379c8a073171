"""What the widget asks for and what it gets: the plugin's work without Qt and without napari, in any thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from vispe.errors import VispeError, is_memory
from vispe.images.read import Micrograph
from vispe.segment.features.pixel_features import FeatureConfig
from vispe.segment.invariance_report import Trust, trust_page
from vispe.segment.live.live_segmentation import Live
from vispe.segment.live.suggestions import Place, suggest
from vispe.segment.model.model_file import Model
from vispe.segment.overlays import Color
from vispe.segment.pipeline import DEFAULT
from vispe.segment.run.prediction import Prediction

FEATURES: dict[str, FeatureConfig] = {
    "vispe_micro and filters": DEFAULT,
    "filters": FeatureConfig(),
    "vispe_micro": FeatureConfig("tokens", model=DEFAULT.model),
}
"""The features to choose from, by what the widget calls them; the first is that of `vispe segment`."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Setup:
    """What decides which features are kept; a change starts anew.

    Attributes:
        image: the image, the same object as long as it is the same image.
        features: key of `FEATURES`; not used with a model.
        classifier: `'logistic'`, `'forest'` or `'boosting'`; not used with a model.
        model: an earlier model to begin with.
    """

    image: Micrograph
    features: str = next(iter(FEATURES))
    classifier: str = "logistic"
    model: Model | None = None

    def same(self, other: Setup | None) -> bool:
        """Whether what is kept for `other` serves this, too."""
        if other is None or self.image is not other.image or self.model is not other.model:
            return False
        chosen = (self.features, self.classifier) == (other.features, other.classifier)
        return chosen or self.model is not None


@dataclass(frozen=True, eq=False)
class Request:
    """One piece of work.

    Attributes:
        setup: the image and how it is segmented.
        page: page that is shown, from 0.
        names: class names.
        labels: (h, w) of the page, (z, h, w) of all pages, or None to predict with the model there is; without any
            label on them, a model of the setup predicts, too.
        every: predict every page and not only the one that is shown.
        trust: find out whether turning the page changes the result.
        suggest: choose places on the page for the next strokes.
    """

    setup: Setup
    page: int = 0
    names: Sequence[str] = ()
    labels: np.ndarray | None = None
    every: bool = False
    trust: bool = False
    suggest: bool = False


@dataclass(eq=False)
class Answer:
    """What came of a request.

    Attributes:
        pages: results by page.
        names: the K class names.
        colors: those of a model that has some, else None.
        notes: what the user should know.
        seconds: time taken.
        trust: the report that was asked for.
        places: where the next strokes would teach most, if that was asked for.
        error: one sentence when the request could not be met; the rest is empty then.
    """

    pages: dict[int, Prediction] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    colors: tuple[Color, ...] | None = None
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    trust: Trust | None = None
    places: tuple[Place, ...] | None = None
    error: str | None = None

    def summary(self) -> str:
        """Say which share of the pixels with data each class has, on all pages of the answer together."""
        labels = (p.labels.ravel() for p in self.pages.values())
        counts = sum(np.bincount(one, minlength=len(self.names) + 1) for one in labels)
        total = max(int(np.sum(counts[1:])), 1)
        counted = zip(self.names, counts[1:], strict=True)
        return ", ".join(f"{name} {100 * n / total:.1f} %" for name, n in counted)


class Session:
    """Answers requests one after the other; features of the last page that was shown stay in memory."""

    def __init__(self) -> None:
        self._setup: Setup | None = None
        self._live: Live | None = None

    @property
    def model(self) -> Model | None:
        """The newest model; None before the first one."""
        return self._live.model if self._live is not None and self._live.ready else None

    @property
    def nbytes(self) -> int:
        """Bytes that are kept for the next request."""
        return self._live.nbytes if self._live is not None else 0

    def forget(self) -> None:
        """Give up what is kept."""
        self._setup = self._live = None

    def answer(self, request: Request, step: Callable[[float], None] | None = None) -> Answer:
        """Do what is asked; what goes wrong is said in `Answer.error` and never raised.

        Args:
            request: the work.
            step: called with the share of the work that each piece is, where it takes long.
        """
        start = time.perf_counter()
        try:
            found = self._answer(request, step)
        except (VispeError, OSError) as error:
            return Answer(error=str(error))
        except Exception as error:
            # a viewer must not die of what a plugin did not foresee; the log has it all
            if is_memory(error):
                self.forget()
                return Answer(
                    error="out of memory; close other layers, choose the features 'filters' or cut the image."
                )
            _log.exception("the plugin failed")
            return Answer(error=f"unexpected {type(error).__name__}: {' '.join(str(error).split())[:200]}.")
        found.seconds = time.perf_counter() - start
        return found

    def _answer(self, request: Request, step: Callable[[float], None] | None) -> Answer:
        live = self._ready(request)
        drawn = request.labels is not None and (request.setup.model is None or request.labels.any())
        if drawn:
            live.draw(request.labels, request.page if request.labels.ndim == 2 else None)
            live.fit()
        answer = Answer(names=live.model.names, colors=live.model.colors)
        if request.trust:
            page, valid = live.normalized()
            still = live.predict()
            answer.trust = trust_page(page, valid, live.segment, live.model.names, still=still, step=step)
            answer.pages[request.page] = still
        elif request.every:
            count = request.setup.image.n_pages
            each = None if step is None else lambda share: step(share / count)
            answer.pages = {page: live.predict(page, each) for page in range(count)}
        else:
            found = live.predict(step=step)
            answer.pages[request.page] = found
            answer.places = tuple(suggest(live, found=found)) if request.suggest else None
        notes = [*live.notes, *(note for page in answer.pages.values() for note in page.notes)]
        answer.notes = tuple(dict.fromkeys(notes))
        return answer

    def _ready(self, request: Request) -> Live:
        """Return what keeps the features of the request's page."""
        setup = request.setup
        if self._live is None or not setup.same(self._setup):
            self.forget()  # before the next features need the memory
            if setup.model is not None:
                self._live = Live(setup.image, page=request.page, model=setup.model)
            else:
                features = FEATURES[setup.features]
                self._live = Live(
                    setup.image, page=request.page, features=features, classifier=setup.classifier
                )
            self._setup = setup
        live = self._live
        live.turn_to(request.page)
        live.names = tuple(request.names)
        return live
