"""The widget: layers and choices in, a segmentation that follows the brush out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from napari.layers import Image, Labels, Layer
from napari.qt.threading import create_worker
from qtpy.QtCore import QTimer
from qtpy.QtWidgets import QFileDialog, QWidget

from vispe.errors import VispeError
from vispe.images.read import Micrograph
from vispe.segment.live.live_segmentation import MAX_CLASSES
from vispe.segment.model.model_file import Model, load_model, save_model
from vispe.segment.napari import layers as between
from vispe.segment.napari.panel import Panel
from vispe.segment.napari.results import hints, show_disagreement, show_pages, show_places
from vispe.segment.napari.session import Answer, Request, Session, Setup

if TYPE_CHECKING:
    from napari.viewer import Viewer

WAIT = 120
"""Milliseconds after the last touch of the brush before the work starts."""


class SegmentWidget(QWidget):
    """Segments the chosen image by the labels that are painted, while they are painted.

    Args:
        napari_viewer: the viewer, which napari passes in; its model alone will do.
    """

    def __init__(self, napari_viewer: Viewer, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.viewer, self.session = napari_viewer, Session()
        self._model: Model | None = None
        self._image: tuple[Layer, Any, Micrograph] | None = None
        self._watched: Labels | None = None
        self._last: tuple[Any, ...] | None = None
        self._worker: Any = None
        self._next: Callable[[], None] | None = None
        self._share = 0.0
        self._timer = QTimer(self, singleShot=True, interval=WAIT)
        self._timer.timeout.connect(self._follow)
        self._clock = QTimer(self, interval=100)
        self._clock.timeout.connect(lambda: self.panel.progress(self._share))
        self.panel = Panel(self)
        self._connect()
        self._list_layers()

    @property
    def image(self) -> Image | None:
        """The chosen image layer."""
        return self._layer(self.panel.image.currentText(), Image)

    @property
    def labels(self) -> Labels | None:
        """The chosen labels layer."""
        return self._layer(self.panel.labels.currentText(), Labels)

    @property
    def busy(self) -> bool:
        """Whether work is going on."""
        return self._worker is not None

    def new_labels(self) -> None:
        """Add an empty labels layer for the chosen image, in vispe's colours, with the brush in hand."""
        image = self.image
        if image is None:
            return self._say("open an image first.", error=True)
        layer = self.viewer.add_labels(
            np.zeros(between.pages_shape(image), np.uint8),
            name=f"{image.name} labels",
            colormap=between.colormap(),
            opacity=0.9,
            metadata={between.MARK: "labels"},
            **between.placement(image),
        )
        layer.brush_size = max(3, round(min(layer.data.shape[-2:]) / 100))
        self.panel.labels.setCurrentText(layer.name)
        return self.panel.choose(1)

    def segment(self, *, every: bool = False, trust: bool = False, suggest: bool = False) -> None:
        """Segment the page that is shown, or every page, or find out whether turning it matters, or what to label."""
        self._start(lambda: self._request(whole=True, every=every, trust=trust, suggest=suggest))

    def load(self, path: str | Path) -> None:
        """Take a model file and predict with it."""
        try:
            model = load_model(path)
        except (VispeError, OSError) as error:
            return self._say(str(error), error=True)
        self._model = model
        self.panel.show_names(model.names)
        self._recolor()
        self.panel.show_model(Path(path).name)
        return self.segment()

    def drop_model(self) -> None:
        """Go back to the choices of features and classifier."""
        self._model = None
        self._recolor()
        self.panel.show_model(None)

    def save(self, path: str | Path) -> None:
        """Write the newest model, over an existing file, too: the dialog has asked."""
        model = self.session.model
        if model is None:
            return self._say("there is no model yet; label at least 2 classes and press Segment.", error=True)
        try:
            save_model(path, model, force=True)
        except (VispeError, OSError) as error:
            return self._say(str(error), error=True)
        return self._say(f"saved as {path}; vispe apply can use it on other images.")

    def _connect(self) -> None:
        panel, events = self.panel, self.viewer.layers.events
        heard: list[tuple[Any, Callable[..., None]]] = [
            (event, self._list_layers)
            for event in (events.inserted, events.removed, events.reordered, events.renamed)
        ]
        heard.append((self.viewer.dims.events.current_step, self._changed))
        for event, method in heard:
            event.connect(method)
        self.destroyed.connect(partial(_stop, heard))
        panel.image.currentTextChanged.connect(self._chosen)
        panel.labels.currentTextChanged.connect(self._chosen)
        panel.new.clicked.connect(self.new_labels)
        panel.picked.connect(self._pick)
        panel.renamed.connect(self._changed)
        panel.go.clicked.connect(lambda: self.segment())
        panel.every.clicked.connect(lambda: self.segment(every=True))
        panel.turn.clicked.connect(lambda: self.segment(trust=True))
        panel.hint.clicked.connect(lambda: self.segment(suggest=True))
        panel.live.toggled.connect(self._changed)
        panel.features.currentTextChanged.connect(self._changed)
        panel.classifier.currentTextChanged.connect(self._changed)
        panel.load.clicked.connect(self._ask_load)
        panel.save.clicked.connect(self._ask_save)
        panel.drop.clicked.connect(self.drop_model)

    def _list_layers(self, event: object = None) -> None:
        """Offer the layers there are; what was chosen stays chosen."""
        own = [layer for layer in self.viewer.layers if between.kind_of(layer) in (None, "labels")]
        self.panel.offer(
            [layer.name for layer in own if isinstance(layer, Image)],
            [layer.name for layer in own if isinstance(layer, Labels)],
        )
        self._chosen()

    def _chosen(self, text: str = "") -> None:
        """Listen to the chosen labels layer, and take over its colours and names."""
        image, labels = self.image, self.labels
        self.panel.every.setVisible(image is not None and len(between.pages_shape(image)) > 2)
        if labels is self._watched:
            return
        if self._watched is not None:
            for event in self._label_events(self._watched):
                event.disconnect(self._changed)
        self._watched = labels
        if labels is None:
            return
        for event in self._label_events(labels):
            event.connect(self._changed)
        if "vispe.names" in labels.metadata:
            self.panel.show_names(labels.metadata["vispe.names"])
        self._recolor()
        self._changed()

    def _recolor(self) -> None:
        """Give labels and classes the colours of the model, or vispe's."""
        colors = self._model.colors if self._model is not None else None
        if self.labels is not None:
            self.labels.colormap = between.colormap(colors)
        self.panel.show_colors(colors)

    @staticmethod
    def _label_events(layer: Labels) -> tuple[Any, ...]:
        """The events after which labels may have changed: the brush, undo, new data."""
        return layer.events.paint, layer.events.labels_update, layer.events.set_data, layer.events.data

    def _pick(self, number: int) -> None:
        """Take the brush with a class."""
        if self.labels is None:
            return
        self.viewer.layers.selection.active = self.labels
        self.labels.selected_label = number
        self.labels.mode = "paint"

    def _changed(self, event: object = None) -> None:
        """Wait for a short rest, then follow."""
        if self.panel.live.isChecked():
            self._timer.start()

    def _follow(self) -> None:
        """Segment anew if live, and if labels, page or choices are not those of the last time."""
        if not self.panel.live.isChecked() or self.image is None:
            return
        if self.labels is None and self._model is None:
            return
        self._start(lambda: self._request(whole=False), quiet=True)

    def _request(
        self, *, whole: bool, every: bool = False, trust: bool = False, suggest: bool = False
    ) -> Request | None:
        """Collect what the work needs; None when nothing changed and only a change counts.

        Raises:
            InputError: layers that do not go together.
        """
        image, labels = self.image, self.labels
        if image is None:
            raise VispeError("open an image first.")
        micrograph = self._micrograph(image)
        page = between.page_at(image, self.viewer.dims.point)
        setup = Setup(
            micrograph, self.panel.features.currentText(), self.panel.classifier.currentText(), self._model
        )
        drawn = None
        if labels is not None:
            stack = between.labels_of(labels, image)
            only_page = not whole and setup.same(self._last[0] if self._last else None)
            only_page = only_page and labels.n_edit_dimensions == 2
            drawn = np.array(stack[page] if only_page else stack)
            most = min(int(drawn.max(initial=0)), MAX_CLASSES)
            if most > len(self.panel.names):
                self.panel.show_names(self.panel.names, most)
        elif self._model is None:
            raise VispeError("choose a labels layer, or press New labels and paint at least 2 classes.")
        names = tuple(self.panel.names)
        now = (setup, page, names, drawn)
        if not whole and self._same(now):
            return None
        self._last = now
        return Request(setup, page, names, drawn, every, trust, suggest)

    def _same(self, now: tuple[Any, ...]) -> bool:
        """Whether this was segmented last."""
        if self._last is None or not now[0].same(self._last[0]) or now[1:3] != self._last[1:3]:
            return False
        here, before = now[3], self._last[3]
        if here is None or before is None:
            return here is before
        before = before[now[1]] if here.ndim == 2 and before.ndim == 3 else before
        return np.array_equal(here, before)

    def _micrograph(self, layer: Image) -> Micrograph:
        """Return the image of a layer, the same object while the layer holds the same data."""
        if self._image is None or self._image[0] is not layer or self._image[1] is not layer.data:
            self._image = layer, layer.data, between.image_of(layer)
        return self._image[2]

    def _start(self, collect: Callable[[], Request | None], quiet: bool = False) -> None:
        """Begin in a thread; while one is at work, the newest wish waits for it."""
        if self.busy:
            if not quiet or self._next is None:
                self._next = lambda: self._start(collect, quiet)
            return
        try:
            request = collect()
        except VispeError as error:
            self._say(str(error), error=True)
            return
        if request is None:
            return
        image, self._share = self.image, 0.0
        self.panel.work(True)
        self._clock.start()
        self._worker = create_worker(self.session.answer, request, self._step, _start_thread=False)
        self._worker.returned.connect(lambda answer: self._show(request, image, answer))
        self._worker.finished.connect(self._done)
        self._worker.start()

    def _done(self) -> None:
        """Let the next one begin."""
        self._worker = None
        self._clock.stop()
        self.panel.work(False)
        wish, self._next = self._next, None
        if wish is not None:
            wish()

    def _step(self, share: float) -> None:
        """Count progress; called in the thread of the work."""
        self._share += share

    def _show(self, request: Request, image: Image, answer: Answer) -> None:
        """Bring an answer to the layers and the panel."""
        if answer.error is not None:
            self._last = None
            self._say(answer.error, error=True)
            return
        if image not in self.viewer.layers:
            return
        if len(answer.names) > len(self.panel.names):
            self.panel.show_names(answer.names)
        if answer.trust is not None:
            show_disagreement(self.viewer, image, request.page, answer.trust.disagreement)
            self.panel.verdict.setText(answer.trust.verdict)
        show_pages(self.viewer, image, answer)
        if answer.places is not None:
            show_places(self.viewer, image, answer.places)
            self._say(hints(answer.places), notes=answer.notes)
            return
        self._say(f"{answer.summary()} ({answer.seconds:.2f} s)", notes=answer.notes)

    def _say(self, text: str, *, error: bool = False, notes: tuple[str, ...] = ()) -> None:
        self.panel.say(text, error, notes)

    def _layer(self, name: str, kind: type) -> Any:
        return next((one for one in self.viewer.layers if one.name == name and isinstance(one, kind)), None)

    def _ask_load(self) -> None:
        path, _ = QFileDialog.getOpenFileName(self, "Load a model", "", "Models of vispe (*.vispe)")
        if path:
            self.load(path)

    def _ask_save(self) -> None:
        path, _ = QFileDialog.getSaveFileName(
            self, "Save the model", "model.vispe", "Models of vispe (*.vispe)"
        )
        if path:
            self.save(path)


def _stop(heard: list[tuple[Any, Callable[..., None]]], gone: object = None) -> None:
    """Let go of the viewer when the widget is gone."""
    for event, method in heard:
        event.disconnect(method)
