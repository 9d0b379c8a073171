"""Saved segmentation models (`.vispe`) as segmenters for evaluation."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from vispe.errors import ShapeError, counted

if TYPE_CHECKING:
    from vispe.segment.types import Prediction


class SavedSegmenter:
    """A `.vispe` model file of `vispe segment` as a function of one image.

    Images must be normalised to [0, 1] by `normalize` and `clip` of the model file, before any pose is applied.

    Args:
        path: the model file.
        device: 'auto', 'cpu', 'cuda' ...

    Attributes:
        names: names of the classes 1 to K.
        n_classes: K.
        normalize: mode of `vispe.images.normalize.normalize`.
        clip: percentiles of the normalisation.

    Raises:
        InputError: the file cannot be loaded.
        ShapeError: it is called with an image of another number of channels.

    Example:
        >>> import tempfile
        >>> from PIL import Image
        >>> from vispe.segment import FeatureConfig, segment
        >>> folder = Path(tempfile.mkdtemp())
        >>> grey = np.repeat([[60, 190]], 48, 0).repeat(24, 1).astype(np.uint8)
        >>> Image.fromarray(grey).save(folder / "a.png")
        >>> report = segment(folder / "a.png", folder / "out", cluster=2, features=FeatureConfig())
        >>> segmenter = SavedSegmenter(folder / "out" / "model.vispe", device="cpu")
        >>> segmenter(torch.from_numpy(grey[None] / 255)).shape
        (48, 48)
    """

    def __init__(self, path: str | Path, *, device: str = "auto") -> None:
        from vispe.segment.model.model_file import load_model, open_features
        from vispe.segment.types import PostProcessing

        self._model, self._post = load_model(path), PostProcessing()
        self.names, self.n_classes = self._model.names, len(self._model.names)
        self.normalize, self.clip = self._model.normalize, self._model.clip
        self._features = open_features(self._model, device)

    def __call__(self, image: Tensor) -> np.ndarray:
        """Return labels (H, W), 1 to K, of an image (c, H, W) in [0, 1]."""
        return self._predicted(image).labels

    def probabilities(self, image: Tensor) -> np.ndarray:
        """Return class probabilities (K, H, W) of an image (c, H, W) in [0, 1]."""
        return self._predicted(image).prob

    @property
    def channels(self) -> int:
        """Number of channels of the images; 3 if the model supports any number."""
        return self._model.channels or 3

    def _predicted(self, image: Tensor) -> "Prediction":
        from vispe.segment.model.prediction import predict_page

        if image.ndim != 3 or image.shape[0] != self.channels:
            raise ShapeError(
                f"SavedSegmenter: images must have {counted(self.channels, 'channel')}, as in training, got "
                f"{tuple(image.shape)}. Select the channels first."
            )
        page = np.ascontiguousarray(image.detach().cpu().to(torch.float32).permute(1, 2, 0).numpy())
        valid = np.ones(page.shape[:2], bool)
        return predict_page(page, valid, self._features, self._model.classifier, self._post, _quiet)


def _quiet(fraction: float) -> None:
    """Ignore progress."""
