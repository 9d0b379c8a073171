"""Requests from the selected layers and the settings of the panel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from napari.layers import Image, Labels

from vispe.errors import VispeError
from vispe.images.read import Micrograph
from vispe.segment.live.labelled_pages import MAX_CLASSES
from vispe.segment.model.model_file import Model
from vispe.segment.napari import layers
from vispe.segment.napari.panel import Panel
from vispe.segment.napari.requests import FeatureSettings, WorkItem


class RequestReader:
    """Reads requests, and recognises those that equal the last one.

    Args:
        panel: the panel with the settings and the class names.
    """

    def __init__(self, panel: Panel) -> None:
        self.panel = panel
        self._image: tuple[Image, Any, Micrograph] | None = None
        self._last: WorkItem | None = None

    def forget(self) -> None:
        """Forget the last request, so that an equal one is work again."""
        self._last = None

    def read(
        self,
        image: Image | None,
        labels: Labels | None,
        point: Sequence[float],
        model: Model | None,
        *,
        explicit: bool,
        **work: bool,
    ) -> WorkItem | None:
        """Return a request; None if nothing has changed since the last one and `explicit` is False.

        Args:
            image: selected image layer.
            labels: selected labels layer.
            point: position of the viewer, which selects the page.
            model: loaded model.
            explicit: whether the user requested the work; otherwise it is a live update.
            work: `every`, `trust` or `suggest` of `WorkItem`.

        Raises:
            VispeError: there is no image, or neither labels nor a model.
            InputError: incompatible layers.
        """
        if image is None:
            raise VispeError("open an image first.")
        if labels is None and model is None:
            raise VispeError("select a labels layer, or press New and paint at least 2 classes.")
        page = layers.page_at(image, point)
        chosen = self.panel.features.currentText(), self.panel.classifier.currentText()
        setup = FeatureSettings(self._micrograph(image), *chosen, model)
        label_array = None
        if labels is not None:
            stack = layers.labels_of(labels, image)
            # after a brush stroke on one page, the session has the labels of the other pages
            only_page = not explicit and setup.is_equivalent(self._last.setup if self._last else None)
            only_page = only_page and labels.n_edit_dimensions == 2
            label_array = np.array(stack[page] if only_page else stack)
            n_classes = min(int(label_array.max(initial=0)), MAX_CLASSES)
            if n_classes > len(self.panel.names):
                self.panel.show_names(self.panel.names, n_classes)
        request = WorkItem(setup, page, tuple(self.panel.names), label_array, **work)
        if not explicit and self._is_last(request):
            return None
        self._last = request
        return request

    def _is_last(self, request: WorkItem) -> bool:
        """Return whether the last request has the same settings, page, names and labels."""
        last = self._last
        if last is None or not request.setup.is_equivalent(last.setup):
            return False
        if (request.page, request.names) != (last.page, last.names):
            return False
        if request.labels is None or last.labels is None:
            return request.labels is last.labels
        one_page = request.labels.ndim == 2 and last.labels.ndim == 3
        return np.array_equal(request.labels, last.labels[last.page] if one_page else last.labels)

    def _micrograph(self, layer: Image) -> Micrograph:
        """Return the image of a layer, the same object as long as the layer has the same data."""
        if self._image is None or self._image[0] is not layer or self._image[1] is not layer.data:
            self._image = layer, layer.data, layers.image_of(layer)
        return self._image[2]
