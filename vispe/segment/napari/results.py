"""Results as layers of the viewer, aligned with the image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vispe.segment.napari.layers import MARK, colormap, kind_of, pages_shape, placement

if TYPE_CHECKING:
    from napari.components import ViewerModel
    from napari.layers import Image, Layer

    from vispe.segment.live.suggestions import Suggestion
    from vispe.segment.napari.requests import Answer

_OF, _COLORS = "vispe.of", "vispe.colors"
_MOVING = ("scale", "translate")


def show_pages(viewer: ViewerModel, image: Image, answer: Answer) -> None:
    """Update the label map and uncertainty layers with the pages of an answer; missing layers are created.

    The layer 'classes' is 0 where there is no data or no result yet; 'uncertainty' is initially hidden.
    """
    classes = _layer(viewer, image, "classes")
    if classes is None:
        data = np.zeros(pages_shape(image), np.uint8)
        classes = _add(viewer, image, "classes", data, colormap=colormap(answer.colors), opacity=0.45)
    elif classes.metadata.get(_COLORS) != answer.colors:
        classes.colormap = colormap(answer.colors)
    classes.metadata[_COLORS] = answer.colors
    classes.features = {"index": range(len(answer.names) + 1), "class": ["no data", *answer.names]}
    uncertainty = _layer(viewer, image, "uncertainty")
    if uncertainty is None:
        data = np.full(pages_shape(image), np.nan, np.float32)
        uncertainty = _add(
            viewer, image, "uncertainty", data, colormap="magma", contrast_limits=(0, 1), visible=False
        )
    _fill(classes, {page: prediction.labels for page, prediction in answer.pages.items()})
    _fill(uncertainty, {page: prediction.uncertainty for page, prediction in answer.pages.items()})


def show_disagreement(viewer: ViewerModel, image: Image, page: int, disagreement: np.ndarray) -> None:
    """Update the layer of the disagreement map (h, w) of poses."""
    layer = _layer(viewer, image, "disagreement")
    if layer is None:
        data = np.full(pages_shape(image), np.nan, np.float32)
        limits = (0, 0.5)
        layer = _add(
            viewer, image, "disagreement", data, colormap="magma", contrast_limits=limits, blending="additive"
        )
    layer.visible = True
    _fill(layer, {page: disagreement})


def show_suggestions(viewer: ViewerModel, image: Image, suggestions: Sequence[Suggestion]) -> None:
    """Mark suggested locations with numbered rings, replacing earlier ones."""
    from napari.layers import Points

    for layer in [candidate for candidate in viewer.layers if kind_of(candidate) == "places"]:
        if layer.metadata.get(_OF) == image.unique_id:
            viewer.layers.remove(layer)
    if not suggestions:
        return
    leading = pages_shape(image)[:-2]
    data = [(*np.unravel_index(p.page, leading), p.y, p.x) if leading else (p.y, p.x) for p in suggestions]
    chosen = viewer.layers.selection.active
    layer = Points(
        np.array(data, float),
        name=f"{image.name} suggested labels",
        size=[2 * p.radius + 1 for p in suggestions],
        face_color="transparent",
        border_color="yellow",
        border_width=0.1,
        features={"number": range(1, len(suggestions) + 1), "reason": [p.reason for p in suggestions]},
        text={"string": "{number}", "color": "yellow", "anchor": "center"},
        metadata={MARK: "places", _OF: image.unique_id},
        **placement(image),
    )
    layer.editable = False
    viewer.layers.append(layer)
    # preserve the active layer, and with it the brush
    if chosen is not None:
        viewer.layers.selection.active = chosen


def suggestion_text(suggestions: Sequence[Suggestion]) -> str:
    """Return the reasons of the suggestions, in order of their numbers."""
    numbered = (f"{n}: {suggestion.reason}" for n, suggestion in enumerate(suggestions, 1))
    return "; ".join(numbered) or "no location is far enough from scribbles and pixels without data."


def _layer(viewer: ViewerModel, image: Image, kind: str) -> Any:
    """Return the layer of a kind that belongs to an image, aligned with the image; None without one.

    A layer of another shape is removed, since the image has changed.
    """
    for layer in viewer.layers:
        if kind_of(layer) == kind and layer.metadata.get(_OF) == image.unique_id:
            if layer.data.shape == pages_shape(image):
                for name in _MOVING:
                    if not np.array_equal(getattr(layer, name), getattr(image, name)):
                        setattr(layer, name, getattr(image, name))
                return layer
            viewer.layers.remove(layer)
            return None
    return None


def _add(viewer: ViewerModel, image: Image, kind: str, data: np.ndarray, **options: Any) -> Layer:
    """Add a layer directly above the image, below the labels, and preserve the selection."""
    from napari.layers import Image as ImageLayer
    from napari.layers import Labels

    chosen = viewer.layers.selection.active
    make = Labels if data.dtype == np.uint8 else ImageLayer
    layer = make(
        data,
        name=f"{image.name} {kind}",
        metadata={MARK: kind, _OF: image.unique_id},
        **options,
        **placement(image),
    )
    if make is Labels:
        layer.editable = False
    viewer.layers.insert(viewer.layers.index(image) + 1, layer)
    if chosen is not None:
        viewer.layers.selection.active = chosen
    return layer


def _fill(layer: Any, pages: dict[int, np.ndarray]) -> None:
    stack = layer.data.reshape(-1, *layer.data.shape[-2:])
    for page, values in pages.items():
        stack[page] = values
    layer.refresh()
