"""Widget of the plugin, which segments the selected image interactively from painted labels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from napari.layers import Image, Labels
from qtpy.QtCore import QTimer
from qtpy.QtWidgets import QFileDialog, QWidget

from vispe.errors import VispeError
from vispe.segment.model.model_file import Model, load_model, save_model
from vispe.segment.napari import layers
from vispe.segment.napari.panel import Panel
from vispe.segment.napari.request_reader import RequestReader
from vispe.segment.napari.requests import Answer, WorkItem
from vispe.segment.napari.results import show_disagreement, show_pages, show_suggestions, suggestion_text
from vispe.segment.napari.session import Session
from vispe.segment.napari.work_queue import Work, WorkQueue

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
        self._model: Model | None = None
        self._watched: Labels | None = None
        self._timer = QTimer(self, singleShot=True, interval=WAIT)
        self._timer.timeout.connect(self._follow)
        self.panel = Panel(self)
        self._requests, self._queue = RequestReader(self.panel), WorkQueue(self.session, self.panel)
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
        return self._queue.busy

    def new_labels(self) -> None:
        """Add an empty labels layer for the selected image, in vispe's colours, with an active brush."""
        image = self.image
        if image is None:
            return self.panel.show_message("open an image first.", error=True)
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
        self._start(explicit=True, every=every, trust=trust, suggest=suggest)

    def load(self, path: str | Path) -> None:
        """Load a model file and predict with it."""
        try:
            model = load_model(path)
        except (VispeError, OSError) as error:
            return self.panel.show_message(str(error), error=True)
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
            return self.panel.show_message(
                "there is no model yet. Label at least 2 classes and press Segment.", error=True
            )
        try:
            save_model(path, model, force=True)
        except (VispeError, OSError) as error:
            return self.panel.show_message(str(error), error=True)
        return self.panel.show_message(f"saved as {path}; vispe apply can use it on other images.")

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
        images, labels = ([x.name for x in usable if isinstance(x, kind)] for kind in (Image, Labels))
        self.panel.list_layers(images, labels)
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
        if (labels := self.labels) is not None:
            self.viewer.layers.selection.active = labels
            labels.selected_label, labels.mode = number, "paint"

    def _changed(self, event: object = None) -> None:
        """Start the delay of the live update."""
        if self.panel.live.isChecked():
            self._timer.start()

    def _follow(self) -> None:
        """Segment again in live mode, if labels, page or settings have changed."""
        has_classes = self.labels is not None or self._model is not None
        if self.panel.live.isChecked() and self.image is not None and has_classes:
            self._start(explicit=False)

    def _start(self, *, explicit: bool, **work: bool) -> None:
        """Start or queue a request; a live update is ignored if nothing has changed."""

        def collect() -> Work | None:
            image, point = self.image, self.viewer.dims.point
            request = self._requests.read(image, self.labels, point, self._model, explicit=explicit, **work)
            return None if request is None else (request, partial(self._show, request, image))

        self._queue.start(collect, quiet=not explicit)

    def _show(self, request: WorkItem, image: Image, answer: Answer) -> None:
        if answer.superseded or answer.error is not None:
            self._requests.forget()  # the next request is work, even with equal labels
            if answer.error is not None:
                self.panel.show_message(answer.error, error=True)
            return
        if answer.preview:
            self._queue.progress = 0.0
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
            self.panel.show_message(suggestion_text(answer.suggestions), notes=answer.notes)
            return
        suffix = ", preview" if answer.preview else ""
        self.panel.show_message(f"{answer.summary()} ({answer.seconds:.2f} s{suffix})", notes=answer.notes)

    def _layer(self, name: str, kind: type) -> Any:
        named = (layer for layer in self.viewer.layers if layer.name == name)
        return next((layer for layer in named if isinstance(layer, kind)), None)

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
