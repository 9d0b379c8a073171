"""Conversion between napari layers and vispe's arrays; independent of Qt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vispe.errors import InputError, require
from vispe.images.formats.decoded_image import times
from vispe.images.read import Micrograph
from vispe.segment.live.array_image import micrograph
from vispe.segment.overlays import PALETTE, Color

if TYPE_CHECKING:
    from napari.layers import Image, Labels, Layer
    from napari.utils.colormaps import DirectLabelColormap

MARK = "vispe"
"""Key in the metadata of the plugin's layers; its value is the kind of layer."""

_TRANSFORM = ("scale", "translate", "rotate", "shear", "affine", "units", "axis_labels")


def image_of(layer: Image) -> Micrograph:
    """Read an image layer: all dimensions except the last two, and colour, are pages.

    Multiscale layers are read at the finest scale, and colours with transparency without alpha; fully transparent
    pixels are excluded.

    Raises:
        InputError: a non-numeric layer, or one without data.
    """
    data = np.asarray(layer.data[0] if layer.multiscale else layer.data)
    opaque = data[..., 3] > 0 if layer.rgb and data.shape[-1] == 4 else None
    if layer.rgb:
        data = data[..., :3]
    leading = data.ndim - 2 - bool(layer.rgb)
    axes = "".join(chr(ord("a") + k) for k in range(leading)).upper()
    axes = axes.translate(str.maketrans("XYC", "UVW"))  # avoid the reserved letters
    image = micrograph(data, f"{axes}YX{'C' if layer.rgb else ''}", layer.name)
    return image if opaque is None else image.exclude_transparent(opaque.reshape(image.pages.shape[:3]))


def pages_shape(layer: Image) -> tuple[int, ...]:
    """Return the shape of an image layer without colours, such as (z, h, w)."""
    data = layer.data[0] if layer.multiscale else layer.data
    return tuple(data.shape[:-1] if layer.rgb else data.shape)


def page_at(layer: Image, point: Sequence[float]) -> int:
    """Return the number of the page displayed at a point in world coordinates, clipped to existing pages."""
    shape = pages_shape(layer)[:-2]
    if not shape:
        return 0
    position = np.asarray(layer.world_to_data(point))[-len(shape) - 2 : -2]
    index = [int(np.clip(round(float(p)), 0, n - 1)) for p, n in zip(position, shape, strict=True)]
    return int(np.ravel_multi_index(index, shape))


def labels_of(layer: Labels, image: Image) -> np.ndarray:
    """Return the labels (z, h, w) of a layer, without copying.

    Raises:
        InputError: the layer has another size than the image.
    """
    data, shape = np.asarray(layer.data), pages_shape(image)
    if data.shape != shape:
        raise InputError(
            f"the labels layer {layer.name!r} is {times(data.shape)}, but the image {image.name!r} is "
            f"{times(shape)}. Create a new labels layer for this image."
        )
    return data.reshape(-1, *shape[-2:])


def placement(layer: Layer) -> dict[str, Any]:
    """Return the transform of a layer, for another layer of equal shape."""
    return {name: getattr(layer, name) for name in _TRANSFORM if hasattr(layer, name)}


def colormap(colors: Sequence[Color] | None = None) -> DirectLabelColormap:
    """Return vispe's colours for labels 1, 2, ...; 0 and all others are transparent."""
    require("napari", "napari", "the plugin")
    from napari.utils.colormaps import DirectLabelColormap

    colors = [*(colors or ()), *PALETTE[len(colors or ()) :]]
    color_by_label: dict[int | None, Any] = {None: (0, 0, 0, 0), 0: (0, 0, 0, 0)}
    color_by_label |= {k + 1: (*(c / 255 for c in color), 1) for k, color in enumerate(colors)}
    return DirectLabelColormap(color_dict=color_by_label)


def kind_of(layer: Layer) -> str | None:
    """Return the kind of a layer of the plugin: 'labels', 'classes', 'uncertainty' or 'disagreement'; else None."""
    return layer.metadata.get(MARK)
