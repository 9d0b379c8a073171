"""Batching of images, and the types of callables accepted by evaluators."""

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from vispe.errors import InputError, OptionError, ShapeError, counted
from vispe.utils.options import PositiveInt, checked

FeatureFunction = Callable[[Tensor], Tensor]
"""Images (b, c, H, W) -> feature maps (b, d, h, w); wrap a function of one image in `PerImage`."""

Segmenter = Callable[[Tensor], "np.ndarray | Tensor"]
"""One image (c, H, W) -> integer labels (H, W): 1..K are classes, 0 means no data."""


class PerImage:
    """A feature function of one image, (c, H, W) -> (d, h, w), applied to each image of a batch.

    Args:
        function: returns the feature map of one image.

    Raises:
        RuntimeError: the maps of the images have different shapes.

    Example:
        >>> PerImage(lambda image: image[:, ::2, ::2])(torch.zeros(4, 3, 8, 8)).shape
        torch.Size([4, 3, 4, 4])
    """

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self.function = function
        patch_size = getattr(function, "patch_size", None)
        if patch_size is not None:
            self.patch_size = patch_size

    def __call__(self, images: Tensor) -> Tensor:
        """Return the feature maps (b, d, h, w) of images (b, c, H, W)."""
        return torch.stack([self.function(image) for image in images])


@checked
def batches(images: Iterable[Tensor], batch_size: PositiveInt = 1) -> Iterator[Tensor]:
    """Yield images as batches (b, c, H, W) in order; a batch ends where the image size changes.

    Only one batch is in memory at a time.

    Args:
        images: (c, H, W) each, floating point; or a tensor (n, c, H, W).
        batch_size: maximum number of images in a batch.

    Raises:
        InputError: there are no images, or an image has values that are not finite.
        ShapeError: an image is not (c, H, W).
        OptionError: `batch_size` is below 1.

    >>> [len(batch) for batch in batches(torch.zeros(5, 3, 8, 8), batch_size=2)]
    [2, 2, 1]
    """
    batch: list[Tensor] = []
    number = -1
    for number, image in enumerate(images):
        _check(image, number)
        if batch and (len(batch) == batch_size or batch[0].shape != image.shape):
            yield torch.stack(batch)
            batch = []
        batch.append(image)
    if number < 0:
        raise InputError("images must contain at least one image, got none.")
    yield torch.stack(batch)


def features_of(f: FeatureFunction, images: Tensor) -> Tensor:
    """Return the feature maps (b, d, h, w) of a batch in float64, without gradients.

    Raises:
        ShapeError: `f` did not return one map per image.
        InputError: the map has values that are not finite.
    """
    with torch.no_grad():
        return checked_maps(f(images), len(images))


def checked_maps(maps: Tensor, count: int) -> Tensor:
    """Return maps (b, d, h, w) as float64; errors as in `features_of`."""
    if not isinstance(maps, Tensor) or maps.ndim != 4 or len(maps) != count or 0 in maps.shape:
        raise ShapeError(
            f"The feature function must return maps (b, d, h, w) for {counted(count, 'image')}, got {_shape(maps)}. "
            "Wrap a function of a single image in PerImage."
        )
    if not torch.isfinite(maps).all():
        raise InputError(
            "The feature map must be finite, got NaN or infinity. Check the model and the images."
        )
    return maps.double()


def labels_of(s: Segmenter, image: Tensor) -> np.ndarray:
    """Return the labels (H, W) int64 of one image.

    Raises:
        ShapeError: the size of the labels differs from that of the image.
        InputError: the labels are not non-negative integers.
    """
    with torch.no_grad():
        labels = s(image)
    return checked_labels(labels, tuple(image.shape[-2:]), "The segmenter returned")


def checked_labels(labels: object, size: tuple[int, ...], who: str) -> np.ndarray:
    """Return a label map as int64 (H, W); errors as in `labels_of`."""
    array = labels.detach().cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
    if array.shape != size:
        raise ShapeError(
            f"{who} labels of shape {array.shape}, but the image has {size} px. The sizes must be equal."
        )
    if array.dtype.kind not in "ui" or array.min(initial=0) < 0:
        raise InputError(
            f"{who} {array.dtype} values with minimum {array.min(initial=0)}. Labels must be non-negative integers, 0 "
            "for no data."
        )
    return array.astype(np.int64)


def patch_of(f: object, patch_size: int | None) -> int:
    """Return the patch size in pixels: `patch_size`, or `f.patch_size` by default.

    Raises:
        OptionError: neither `patch_size` nor `f.patch_size` is set, or the patch size is below 1.
    """
    patch_size = getattr(f, "patch_size", None) if patch_size is None else patch_size
    if patch_size is None or patch_size < 1:
        raise OptionError(
            f"patch_size must be the number of pixels per token, got {patch_size}. Pass patch_size, which is 1 for "
            "maps as large as "
            "the image."
        )
    return int(patch_size)


def _check(image: Tensor, number: int) -> None:
    if not isinstance(image, Tensor) or image.ndim != 3:
        raise ShapeError(f"Image {number} must be a tensor (c, H, W), got {_shape(image)}.")
    if not image.is_floating_point() or not torch.isfinite(image).all():
        infinite = " with values that are not finite" if image.is_floating_point() else ""
        raise InputError(
            f"Image {number} must have finite floating-point values, got {image.dtype}{infinite}. Normalise it first."
        )


def _shape(value: object) -> tuple[int, ...] | str:
    return tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
