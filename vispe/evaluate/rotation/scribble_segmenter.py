"""Segmenter trained on scribbled pixels: logistic regression on standardised features.

Features are interpolated at the scribbled pixels only. Scores are linear in the features, and bilinear interpolation is
linear with weights that sum to 1, so scores of tokens are upsampled instead of features: the labels are the same, with
K values per pixel in memory.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import grid_sample, interpolate

from vispe.backbones.batching import FeatureFunction, features_of
from vispe.errors import InputError
from vispe.images.symmetry.d4 import IDENTITY, Element


class TrainedSegmenter:
    """Logistic regression on the features of scribbled pixels, as a function image (c, H, W) -> labels (H, W).

    Args:
        f: images (b, c, H, W) -> maps (b, d, h, w).
        maps: training maps (d, h, w) of f.
        marks: scribbles (H, W) for each map: the class, or 0.

    Raises:
        InputError: the scribbles have fewer than two classes.
    """

    def __init__(self, f: FeatureFunction, maps: Sequence[Tensor], marks: Sequence[np.ndarray]) -> None:
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        self.f = f
        classes = np.concatenate([m[m > 0] for m in marks])
        if len(np.unique(classes)) < 2:
            raise InputError(
                f"TrainedSegmenter: marks must have two classes, got {np.unique(classes)}. Add scribbles."
            )
        samples = np.concatenate([sample_at_pixels(one, m > 0) for one, m in zip(maps, marks, strict=True)])
        model = make_pipeline(StandardScaler(), LogisticRegression(class_weight="balanced", max_iter=1000))
        self._model = model.fit(samples, classes)

    @classmethod
    def of_image(
        cls, f: FeatureFunction, image: Tensor, marks: np.ndarray, elements: Sequence[Element] = (IDENTITY,)
    ) -> "TrainedSegmenter":
        """Train on one image (c, H, W) and its scribbles in several poses; use all of D4 for augmentation."""
        maps = [features_of(f, g.apply(image)[None])[0] for g in elements]
        return cls(f, maps, [g.apply(marks) for g in elements])

    def __call__(self, image: Tensor) -> np.ndarray:
        """Return the labels (H, W) of an image (c, H, W)."""
        return self.labels(features_of(self.f, image[None])[0], tuple(image.shape[-2:]))

    def labels(self, maps: Tensor, size: tuple[int, ...]) -> np.ndarray:
        """Return the labels (H, W) of an image of size `size` from its map (d, h, w)."""
        tokens = maps.flatten(1).T.cpu().numpy()
        scores = self._model.decision_function(tokens).reshape(len(tokens), -1)
        grid = torch.from_numpy(scores).T.reshape(1, -1, *maps.shape[1:])
        full = interpolate(grid, size, mode="bilinear", align_corners=False)[0].numpy()
        chosen = (full[0] > 0).astype(np.int64) if len(full) == 1 else full.argmax(0)
        return self._model.classes_[chosen].astype(np.int64)


def sample_at_pixels(maps: Tensor, chosen: np.ndarray) -> np.ndarray:
    """Return the bilinearly interpolated features (n, d) at pixels (H, W) bool of a map (d, h, w), row-major."""
    pixels = np.argwhere(chosen)
    # normalised coordinates: -1 to 1 between the outer edges of the corner pixels
    unit = (pixels + 0.5) / np.array(chosen.shape) * 2 - 1
    grid = torch.from_numpy(unit[:, ::-1].copy()).to(maps)[None, None]
    values = grid_sample(maps[None], grid, mode="bilinear", padding_mode="border", align_corners=False)
    return values[0, :, 0].T.cpu().numpy()
