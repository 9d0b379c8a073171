"""What a positional probe looks at: feature maps of a model, of a function or as given."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from torch import Tensor, nn

from vispe.backbones.batching import FeatureFunction, features_of
from vispe.backbones.model_access import image_tower, input_settings
from vispe.backbones.vision_model import VisionModel
from vispe.errors import OptionError
from vispe.evaluate.probe.fit import Features, to_numpy

Source = nn.Module | Callable[[Tensor], Tensor] | Iterable[Features]
"""A model, a feature function (b, c, H, W) -> (b, d, h, w), or features (h, w, C) of each image."""


def feature_function(source: nn.Module | FeatureFunction) -> FeatureFunction:
    """Return the function from images (b, c, H, W) to maps (b, d, h, w) that a model is, or that was given.

    Args:
        source: a model of timm or open_clip, converted or not, whose last block is taken with the final norm; or
            any callable from images to maps, such as `VisionModel` or `vispe.D4Features`.
    """
    is_model = isinstance(source, nn.Module) and hasattr(image_tower(source), "forward_intermediates")
    return VisionModel(source) if is_model else source


def is_features(source: Source) -> bool:
    """Whether a source is features already, not something that computes them."""
    return not callable(source)


def check_images(features: bool, images: object) -> None:
    """Raise OptionError for features with images, and for a model without them."""
    if features and images is not None:
        raise OptionError("The probe got features and images; give a model with images, or features alone.")
    if not features and images is None:
        raise OptionError("The probe of a model needs images; give images (b, 3, H, W).")


def each_features(source: Source, images: Iterable[Tensor] | None) -> Iterator[np.ndarray]:
    """Yield the features (h, w, C) float64 of one image after another.

    Args:
        source: a model, a feature function, or features (h, w, C) of each image.
        images: (c, H, W) each, normalised, for a model or function; None with features.

    Raises:
        OptionError: features and images, or a model without images.
    """
    check_images(is_features(source), images)
    if is_features(source):
        yield from map(to_numpy, source)
        return
    f = feature_function(source)
    for image in images:
        yield to_numpy(features_of(f, image[None])[0].permute(1, 2, 0))


def patch_pixels(image: Tensor, patch: int) -> Tensor:
    """Return the pixels of every patch as features, (h, w, c·patch²): the control without a model.

    Args:
        image: (c, H, W), both sides multiples of the patch.
        patch: side of a patch in pixels.
    """
    return nn.functional.pixel_unshuffle(image[None], patch)[0].permute(1, 2, 0)


def black_image(source: Any) -> Tensor | None:
    """Return a black pixel as a model gets it, (3, 1, 1): zeros, normalised; None where that is not known."""
    if isinstance(source, VisionModel):
        return -source.mean / source.std
    model = image_tower(source)
    if not (hasattr(model, "image_mean") or hasattr(model, "pretrained_cfg")):
        return None
    _, mean, std = input_settings(model)
    return -mean / std
