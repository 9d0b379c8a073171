"""Images one batch at a time, and the kinds of callables that the evaluators accept."""

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from vispe.errors import InputError, OptionError, ShapeError

FeatureFunction = Callable[[Tensor], Tensor]
"""Images (b, c, H, W) -> feature maps (b, d, h, w); wrap a function of one image in `PerImage`."""

Segmenter = Callable[[Tensor], "np.ndarray | Tensor"]
"""One image (c, H, W) -> labels (H, W) of whole numbers: 1..K are classes, 0 is no data."""


class PerImage:
    """A feature function of one image, (c, H, W) -> (d, h, w), made to take batches.

    Args:
        function: computes the map of one image.

    >>> PerImage(lambda image: image[:, ::2, ::2])(torch.zeros(4, 3, 8, 8)).shape
    torch.Size([4, 3, 4, 4])
    """

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self.function = function
        patch = getattr(function, "patch", None)
        if patch is not None:
            self.patch = patch

    def __call__(self, images: Tensor) -> Tensor:
        """Images (b, c, H, W) -> maps (b, d, h, w)."""
        return torch.stack([self.function(image) for image in images])


def batches(images: Iterable[Tensor], batch_size: int = 1) -> Iterator[Tensor]:
    """Yield images as batches (b, c, H, W) in their order; a batch ends where the size changes.

    Only one batch is held.

    Args:
        images: (c, H, W) each, floating point; a tensor (n, c, H, W) serves too.
        batch_size: most images in a batch.

    Raises:
        InputError: no images, or values that are not finite.
        ShapeError: an image is not (c, H, W).
        OptionError: a batch size below 1.

    >>> [len(batch) for batch in batches(torch.zeros(5, 3, 8, 8), batch_size=2)]
    [2, 2, 1]
    """
    if batch_size < 1:
        raise OptionError(f"batch_size must be 1 or more, got {batch_size}.")
    held: list[Tensor] = []
    number = -1
    for number, image in enumerate(images):
        _check(image, number)
        if held and (len(held) == batch_size or held[0].shape != image.shape):
            yield torch.stack(held)
            held = []
        held.append(image)
    if number < 0:
        raise InputError("There are no images to measure; give at least one.")
    yield torch.stack(held)


def features_of(f: FeatureFunction, images: Tensor) -> Tensor:
    """Return f's maps (b, d, h, w) of a batch in float64, without gradients.

    Raises:
        ShapeError: f returned something else than one map for each image.
        InputError: the map holds values that are not finite.
    """
    with torch.no_grad():
        return checked_maps(f(images), len(images))


def checked_maps(maps: Tensor, count: int) -> Tensor:
    """Return maps (b, d, h, w) as float64, and raise where they are none."""
    if not isinstance(maps, Tensor) or maps.ndim != 4 or len(maps) != count or 0 in maps.shape:
        raise ShapeError(
            f"The feature function must return maps (b, d, h, w) for {count} images, got {_shape(maps)}; "
            "wrap a function of a single image in PerImage."
        )
    if not torch.isfinite(maps).all():
        raise InputError("The feature map holds values that are not finite; check the model and the images.")
    return maps.double()


def labels_of(s: Segmenter, image: Tensor) -> np.ndarray:
    """Return s's labels (H, W) int64 of one image.

    Raises:
        ShapeError: the labels are not as large as the image.
        InputError: the labels are not whole numbers from 0 up.
    """
    with torch.no_grad():
        labels = s(image)
    return checked_labels(labels, tuple(image.shape[-2:]), "The segmenter returned")


def checked_labels(labels: object, size: tuple[int, ...], who: str) -> np.ndarray:
    """Return a label map as int64 (H, W), and raise where it is none."""
    array = labels.detach().cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
    if array.shape != size:
        raise ShapeError(f"{who} labels {array.shape} for an image of {size} px; they must be equally large.")
    if array.dtype.kind not in "ui" or array.min(initial=0) < 0:
        raise InputError(
            f"{who} {array.dtype} values down to {array.min(initial=0)}; labels are whole numbers, 0 for no data."
        )
    return array.astype(np.int64)


def patch_of(f: object, patch: int | None) -> int:
    """Return the side of a patch in pixels: as given, else as `f.patch` says."""
    patch = getattr(f, "patch", None) if patch is None else patch
    if patch is None or patch < 1:
        raise OptionError(
            f"How many pixels a token spans is not known (patch={patch}); give patch=, which is 1 for a map as "
            "large as the image."
        )
    return int(patch)


def _check(image: Tensor, number: int) -> None:
    if not isinstance(image, Tensor) or image.ndim != 3:
        raise ShapeError(f"Image {number} must be a tensor (c, H, W), got {_shape(image)}.")
    if not image.is_floating_point() or not torch.isfinite(image).all():
        infinite = " with values that are not finite" if image.is_floating_point() else ""
        raise InputError(
            f"Image {number} must hold finite floating-point values, got {image.dtype}{infinite}; normalise it first."
        )


def _shape(value: object) -> tuple[int, ...] | str:
    return tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
