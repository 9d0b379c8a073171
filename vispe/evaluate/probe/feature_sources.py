"""Feature maps for the positional probe: from a model, a segmenter or a function, or precomputed."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vispe.backbones.batching import FeatureFunction, features_of, labels_of
from vispe.backbones.model_access import image_tower, input_settings
from vispe.backbones.user_callables import D4Segmenter
from vispe.backbones.vision_model import VisionModel
from vispe.errors import OptionError
from vispe.evaluate.evaluated import EvaluatedModel
from vispe.evaluate.probe.regression_data import Features, to_numpy

Source = nn.Module | Callable[[Tensor], Tensor] | Iterable[Features]
"""A model, a feature function (b, c, H, W) -> (b, d, h, w), or features (h, w, C) of each image."""


def feature_function(source: nn.Module | FeatureFunction) -> FeatureFunction:
    """Return a function from images (b, c, H, W) to maps (b, d, h, w).

    Args:
        source: a model of timm or open_clip, converted or not, for which the function returns the features of the last
            block after the final norm; or any callable from images to maps, such as `VisionModel` or
            `vispe.D4Features`.
    """
    is_model = isinstance(source, nn.Module) and hasattr(image_tower(source), "forward_intermediates")
    return VisionModel(source) if is_model else source


def is_features(source: Source) -> bool:
    """Whether a source is precomputed features."""
    return not callable(source)


def check_images(features: bool, images: object) -> None:
    """Raise OptionError for features with images, and for a model without them."""
    if features and images is not None:
        raise OptionError("probe: got features and images. Pass a model with images, or features only.")
    if not features and images is None:
        raise OptionError("probe: a model needs images, got None. Pass images (b, 3, H, W).")


def each_features(source: Source, images: Iterable[Tensor] | None) -> Iterator[np.ndarray]:
    """Yield the features (h, w, C) float64 of each image.

    Args:
        source: a model, a feature function, or features (h, w, C) of each image.
        images: (c, H, W) each, normalised, for a model or function; None with features.

    Raises:
        OptionError: `images` is set for precomputed features, or missing for a model.
    """
    check_images(is_features(source), images)
    if is_features(source):
        yield from map(to_numpy, source)
        return
    f = feature_function(source)
    for image in images:
        yield to_numpy(features_of(f, image[None])[0].permute(1, 2, 0))


def patch_pixels(image: Tensor, patch_size: int) -> Tensor:
    """Return the pixels of every patch as features, (h, w, c·patch²), the control without a model.

    Args:
        image: (c, H, W), both sides multiples of the patch size.
        patch_size: patch size in pixels.
    """
    return nn.functional.pixel_unshuffle(image[None], patch_size)[0].permute(1, 2, 0)


def black_image(source: Any) -> Tensor | None:
    """Return a black pixel after normalisation, (3, 1, 1); None if the normalisation is unknown."""
    if isinstance(source, VisionModel):
        return -source.mean / source.std
    model = image_tower(source)
    if not (hasattr(model, "image_mean") or hasattr(model, "pretrained_cfg")):
        return None
    _, mean, std = input_settings(model)
    return -mean / std


class ClassMaps:
    """A segmenter as a feature function: images (b, c, H, W) -> probabilities or one-hot labels (b, K, H, W).

    Args:
        subject: a model with a segmenter.

    Raises:
        OptionError: the segmenter has neither probabilities nor names of classes.
    """

    def __init__(self, subject: EvaluatedModel) -> None:
        self.segmenter, self.names = subject.segmenter, subject.names
        self.probabilities = getattr(self.segmenter, "probabilities", None)
        # a segmenter averaged over poses returns labels only
        if isinstance(self.segmenter, D4Segmenter):
            self.probabilities = None
        if self.probabilities is None and not self.names:
            raise OptionError(
                f"{subject.title}: the segmenter returns labels without a class count, got names={self.names!r}. Set "
                "`names`, or add a method probabilities(image) -> (K, H, W)."
            )

    def __call__(self, images: Tensor) -> Tensor:
        """Return the probabilities or one-hot labels (b, K, H, W) of images (b, c, H, W)."""
        if self.probabilities is not None:
            return torch.stack([torch.as_tensor(self.probabilities(image)).float() for image in images])
        labels = torch.stack([torch.as_tensor(labels_of(self.segmenter, image)) for image in images])
        # classes are numbered from 1; 0 means no data
        return (labels[:, None] == torch.arange(1, len(self.names) + 1)[:, None, None]).float()
