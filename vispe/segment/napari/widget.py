"""Widget of the plugin, which segments the selected image interactively from painted labels."""

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
from vispe.segment.live.labelled_pages import MAX_CLASSES
from vispe.segment.model.model_file import Model, load_model, save_model
from vispe.segment.napari import layers
from vispe.segment.napari.panel import Panel
from vispe.segment.napari.results import show_disagreement, show_pages, show_suggestions, suggestion_text
from vispe.segment.napari.session import Answer, FeatureSettings, Session, WorkItem

if TYPE_CHECKING:
    from napari.viewer import Viewer

WAIT = 120
"""Delay in milliseconds after the last brush event before the work starts."""


class SegmentWidget(QWidget):
    """Segments the selected image by the painted labels, while they are painted.

    Args:
        napari_viewer: the viewer, passed by napari; its model is sufficient.
    """

    def __init__(self, napari_viewer: Viewer, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.viewer, self.session = napari_viewer, Session()
        self.session.is_superseded = lambda: self._next is not None
        self._model: Model | None = None
        self._image: tuple[Layer, Any, Micrograph] | None = None
        self._watched: Labels | None = None
        self._last: tuple[Any, ...] | None = None
        self._worker: Any = None
        self._next: Callable[[], None] | None = None
        self._progress = 0.0
        self._timer = QTimer(self, singleShot=True, interval=WAIT)
        self._timer.timeout.connect(self._follow)
        self._clock = QTimer(self, interval=100)
        self._clock.timeout.connect(lambda: self.panel.progress(self._progress))
        self.panel = Panel(self)
        self._connect()
        self._list_layers()

    @property
    def image(self) -> Image | None:
        """Selected image layer."""
        return self._layer(self.panel.image.currentText(), Image)

    @property
    def labels(self) -> Labels | None:
        """Selected labels layer."""
        return self._layer(self.panel.labels.currentText(), Labels)

    @property
    def busy(self) -> bool:
        """Whether work is in progress."""
        return self._worker is not None

    def new_labels(self) -> None:
        """Add an empty labels layer for the selected image, in vispe's colours, with an active brush."""
        image = self.image
        if image is None:
            return self._say("open an image first.", error=True)
        layer = self.viewer.add_labels(
            np.zeros(layers.pages_shape(image), np.uint8),
            name=f"{image.name} labels",
            colormap=layers.colormap(),
            opacity=0.9,
            metadata={layers.MARK: "labels"},
            **layers.placement(image),
        )
        layer.brush_size = max(3, round(min(layer.data.shape[-2:]) / 100))
        self.panel.labels.setCurrentText(layer.name)
        return self.panel.choose(1)

    def segment(self, *, every: bool = False, trust: bool = False, suggest: bool = False) -> None:
        """Segment the current page, or every page, or test its invariance to poses, or suggest locations for labels."""
        self._start(lambda: self._request(explicit=True, every=every, trust=trust, suggest=suggest))

    def load(self, path: str | Path) -> None:
        """Load a model file and predict with it."""
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
        """Return to the selected features and classifier."""
        self._model = None
        self._recolor()
        self.panel.show_model(None)

    def save(self, path: str | Path) -> None:
        """Write the latest model, also over an existing file, as confirmed in the dialog."""
        model = self.session.model
        if model is None:
            return self._say("there is no model yet. Label at least 2 classes and press Segment.", error=True)
        try:
            save_model(path, model, force=True)
        except (VispeError, OSError) as error:
            return self._say(str(error), error=True)
        return self._say(f"saved as {path}; vispe apply can use it on other images.")

    def _connect(self) -> None:
        panel, events = self.panel, self.viewer.layers.events
        connections: list[tuple[Any, Callable[..., None]]] = [
            (event, self._list_layers)
            for event in (events.inserted, events.removed, events.reordered, events.renamed)
        ]
        connections.append((self.viewer.dims.events.current_step, self._changed))
        for event, method in connections:
            event.connect(method)
        self.destroyed.connect(partial(_stop, connections))
        panel.image.currentTextChanged.connect(self._chosen)
        panel.labels.currentTextChanged.connect(self._chosen)
        panel.new.clicked.connect(self.new_labels)
        panel.picked.connect(self._pick)
        panel.renamed.connect(self._changed)
        panel.segment_button.clicked.connect(lambda: self.segment())
        panel.all_pages_button.clicked.connect(lambda: self.segment(every=True))
        panel.invariance_button.clicked.connect(lambda: self.segment(trust=True))
        panel.suggest_button.clicked.connect(lambda: self.segment(suggest=True))
        panel.live.toggled.connect(self._changed)
        panel.features.currentTextChanged.connect(self._changed)
        panel.classifier.currentTextChanged.connect(self._changed)
        panel.load.clicked.connect(self._ask_load)
        panel.save.clicked.connect(self._ask_save)
        panel.unload_button.clicked.connect(self.drop_model)

    def _list_layers(self, event: object = None) -> None:
        """List the layers; the current selection is preserved."""
        usable = [layer for layer in self.viewer.layers if layers.kind_of(layer) in (None, "labels")]
        self.panel.list_layers(
            [layer.name for layer in usable if isinstance(layer, Image)],
            [layer.name for layer in usable if isinstance(layer, Labels)],
        )
        self._chosen()

    def _chosen(self, text: str = "") -> None:
        """Connect to the selected labels layer, and adopt its colours and names."""
        image, labels = self.image, self.labels
        self.panel.all_pages_button.setVisible(image is not None and len(layers.pages_shape(image)) > 2)
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
        """Set the colours of labels and classes to those of the model, or vispe's."""
        colors = self._model.colors if self._model is not None else None
        if self.labels is not None:
            self.labels.colormap = layers.colormap(colors)
        self.panel.show_colors(colors)

    @staticmethod
    def _label_events(layer: Labels) -> tuple[Any, ...]:
        """Return the events after which labels may have changed: brush, undo, new data."""
        return layer.events.paint, layer.events.labels_update, layer.events.set_data, layer.events.data

    def _pick(self, number: int) -> None:
        """Activate the brush with a class."""
        if self.labels is None:
            return
        self.viewer.layers.selection.active = self.labels
        self.labels.selected_label = number
        self.labels.mode = "paint"

    def _changed(self, event: object = None) -> None:
        """Start the delay of the live update."""
        if self.panel.live.isChecked():
            self._timer.start()

    def _follow(self) -> None:
        """Segment again in live mode, if labels, page or settings have changed."""
        if not self.panel.live.isChecked() or self.image is None:
            return
        if self.labels is None and self._model is None:
            return
        self._start(lambda: self._request(explicit=False), quiet=True)

    def _request(
        self, *, explicit: bool, every: bool = False, trust: bool = False, suggest: bool = False
    ) -> WorkItem | None:
        """Collect a request; None if nothing has changed and `explicit` is False.

        Raises:
            InputError: incompatible layers.
        """
        image, labels = self.image, self.labels
        if image is None:
            raise VispeError("open an image first.")
        micrograph = self._micrograph(image)
        page = layers.page_at(image, self.viewer.dims.point)
        setup = FeatureSettings(
            micrograph, self.panel.features.currentText(), self.panel.classifier.currentText(), self._model
        )
        label_array = None
        if labels is not None:
            stack = layers.labels_of(labels, image)
            only_page = not explicit and setup.is_equivalent(self._last[0] if self._last else None)
            only_page = only_page and labels.n_edit_dimensions == 2
            label_array = np.array(stack[page] if only_page else stack)
            n_classes = min(int(label_array.max(initial=0)), MAX_CLASSES)
            if n_classes > len(self.panel.names):
                self.panel.show_names(self.panel.names, n_classes)
        elif self._model is None:
            raise VispeError("select a labels layer, or press New and paint at least 2 classes.")
        names = tuple(self.panel.names)
        state = (setup, page, names, label_array)
        if not explicit and self._same(state):
            return None
        self._last = state
        return WorkItem(setup, page, names, label_array, every, trust, suggest)

    def _same(self, state: tuple[Any, ...]) -> bool:
        """Return whether the last request was equal."""
        if self._last is None or not state[0].is_equivalent(self._last[0]) or state[1:3] != self._last[1:3]:
            return False
        current, earlier = state[3], self._last[3]
        if current is None or earlier is None:
            return current is earlier
        earlier = earlier[state[1]] if current.ndim == 2 and earlier.ndim == 3 else earlier
        return np.array_equal(current, earlier)

    def _micrograph(self, layer: Image) -> Micrograph:
        """Return the image of a layer, the same object as long as the layer has the same data."""
        if self._image is None or self._image[0] is not layer or self._image[1] is not layer.data:
            self._image = layer, layer.data, layers.image_of(layer)
        return self._image[2]

    def _start(self, collect: Callable[[], WorkItem | None], quiet: bool = False) -> None:
        """Start a request in a thread; while one is running, the latest one waits."""
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
        image, self._progress = self.image, 0.0
        self.panel.set_busy(True)
        self._clock.start()
        self._worker = create_worker(self.session.answers, request, self._step, _start_thread=False)
        self._worker.yielded.connect(lambda answer: self._show(request, image, answer))
        self._worker.finished.connect(self._done)
        self._worker.start()

    def _done(self) -> None:
        self._worker = None
        self._clock.stop()
        self.panel.set_busy(False)
        pending, self._next = self._next, None
        if pending is not None:
            pending()

    def _step(self, fraction: float) -> None:
        """Increase the displayed progress; called in the worker thread."""
        self._progress += fraction

    def _show(self, request: WorkItem, image: Image, answer: Answer) -> None:
        if answer.superseded:
            self._last = None  # the newer request trains again, even with equal labels
            return
        if answer.preview:
            self._progress = 0.0
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
        if answer.suggestions is not None:
            show_suggestions(self.viewer, image, answer.suggestions)
            self._say(suggestion_text(answer.suggestions), notes=answer.notes)
            return
        suffix = ", preview" if answer.preview else ""
        self._say(f"{answer.summary()} ({answer.seconds:.2f} s{suffix})", notes=answer.notes)

    def _say(self, text: str, *, error: bool = False, notes: tuple[str, ...] = ()) -> None:
        self.panel.show_message(text, error, notes)

    def _layer(self, name: str, kind: type) -> Any:
        return next(
            (layer for layer in self.viewer.layers if layer.name == name and isinstance(layer, kind)), None
        )

    def _ask_load(self) -> None:
        path, _ = QFileDialog.getOpenFileName(self, "Load a model", "", "vispe models (*.vispe)")
        if path:
            self.load(path)

    def _ask_save(self) -> None:
        path, _ = QFileDialog.getSaveFileName(self, "Save the model", "model.vispe", "vispe models (*.vispe)")
        if path:
            self.save(path)


def _stop(connections: list[tuple[Any, Callable[..., None]]], destroyed: object = None) -> None:
    """Disconnect from the viewer when the widget is destroyed."""
    for event, method in connections:
        event.disconnect(method)
