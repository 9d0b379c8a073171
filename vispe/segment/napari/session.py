"""Work of the plugin, independent of Qt, napari and threads."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator

from vispe.errors import VispeError, is_out_of_memory
from vispe.segment.invariance_report import measure_invariance
from vispe.segment.live.live_segmentation import Live
from vispe.segment.live.suggestions import suggest
from vispe.segment.model.model_file import Model
from vispe.segment.napari.requests import FEATURES, Answer, FeatureSettings, WorkItem

_log = logging.getLogger(__name__)


class _SupersededError(Exception):
    """A newer request arrived."""


class Session:
    """Processes requests one by one, with the features of the last page cached."""

    def __init__(self) -> None:
        self._setup: FeatureSettings | None = None
        self._live: Live | None = None
        self.is_superseded: Callable[[], bool] = lambda: False
        """Returns whether a newer request waits, for which a final result is interrupted."""

    @property
    def model(self) -> Model | None:
        """The latest model, never that of a preview, for which the classifier is trained; None before the first one."""
        live = self._live
        if live is None or not live.ready:
            return None
        return live.fit() if self._is_preview(live) else live.model

    @staticmethod
    def _is_preview(live: Live) -> bool:
        """Return whether the model of a session is that of a preview."""
        return live.model.classifier.kind == live.preview_kind != live.kind

    @property
    def nbytes(self) -> int:
        """Bytes of the cache."""
        return self._live.nbytes if self._live is not None else 0

    def forget(self) -> None:
        """Clear the cache."""
        self._setup = self._live = None

    def answers(
        self, request: WorkItem, step: Callable[[float], None] | None = None
    ) -> Generator[Answer, None, None]:
        """Yield a preview, if the request trains a classifier that is slower than it, and the result of `answer`.

        The result is superseded if a newer request arrives after the preview.

        Args:
            request: the work.
            step: called with the fraction of each finished piece of long work.
        """
        preview = None
        if request.labels is not None and not (request.every or request.trust or request.suggest):
            preview = self.answer(request, step, preview=True)
            yield preview
            if not preview.preview:
                return

        def check(fraction: float) -> None:
            if preview is not None and self.is_superseded():
                raise _SupersededError
            if step is not None:
                step(fraction)

        yield self.answer(request, check)

    def answer(
        self, request: WorkItem, step: Callable[[float], None] | None = None, *, preview: bool = False
    ) -> Answer:
        """Process a request; errors are returned in `Answer.error` and never raised.

        Args:
            request: the work.
            step: called with the fraction of each finished piece of long work.
            preview: answer with `Live.preview_kind` if the request trains a classifier.
        """
        start = time.perf_counter()
        try:
            answer = self._answer(request, step, preview)
        except _SupersededError:
            return Answer(superseded=True)
        except (VispeError, OSError) as error:
            return Answer(error=str(error))
        except Exception as error:
            # unexpected errors must not crash the viewer; the log has the traceback
            if is_out_of_memory(error):
                self.forget()
                return Answer(
                    error="out of memory. Close other layers, use the features 'filters' or crop the image."
                )
            _log.exception("the plugin failed")
            return Answer(error=f"unexpected {type(error).__name__}: {' '.join(str(error).split())[:200]}.")
        answer.seconds = time.perf_counter() - start
        return answer

    def _answer(self, request: WorkItem, step: Callable[[float], None] | None, preview: bool) -> Answer:
        live = self._ready(request)
        if request.labels is not None:
            live.draw(request.labels, request.page if request.labels.ndim == 2 else None)
        has_labels = request.labels is not None and (request.setup.model is None or bool(live.labelled()))
        if has_labels:
            live.fit(preview)
        elif request.setup.model is not None:
            live.restore_model()
        elif live.ready and self._is_preview(live):
            live.fit()
        answer = Answer(names=live.model.names, colors=live.model.colors)
        answer.preview = has_labels and preview and live.preview_kind != live.kind
        if request.trust:
            page, valid = live.normalized()
            still = live.predict()
            answer.trust = measure_invariance(
                page, valid, live.segment, live.model.names, still=still, step=step
            )
            answer.pages[request.page] = still
        elif request.every:
            count = request.setup.image.n_pages
            page_step = None if step is None else lambda fraction: step(fraction / count)
            answer.pages = {page: live.predict(page, page_step) for page in range(count)}
        else:
            prediction = live.predict(step=step)
            answer.pages[request.page] = prediction
            answer.suggestions = tuple(suggest(live, prediction=prediction)) if request.suggest else None
        notes = [*live.notes, *(note for page in answer.pages.values() for note in page.notes)]
        answer.notes = tuple(dict.fromkeys(notes))
        return answer

    def _ready(self, request: WorkItem) -> Live:
        """Return the live session with the features of the requested page."""
        setup = request.setup
        if self._live is None or not setup.is_equivalent(self._setup):
            self.forget()  # free the memory before computing new features
            if setup.model is not None:
                self._live = Live(setup.image, page=request.page, model=setup.model)
            else:
                features = FEATURES[setup.features]
                self._live = Live(
                    setup.image, page=request.page, features=features, classifier=setup.classifier
                )
            self._setup = setup
        live = self._live
        live.select_page(request.page)
        live.names = tuple(request.names)
        return live
