"""Stored configuration of text segmentation: computation of embeddings, and the text vectors of the classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from vispe.backbones.model_names import CLIP, check_kind, kind_of
from vispe.errors import InputError, OptionError
from vispe.segment.text.readouts import parse_readout
from vispe.utils.interval import Interval
from vispe.utils.options import Options


@dataclass(frozen=True)
class TextConfig(Options):
    """Configuration of the similarity of pixels and texts; JSON-able.

    Attributes:
        model: a name of open_clip, with or without the prefix `open_clip:` and a tag, ``'local-dir:FOLDER'`` or
            ``'hf-hub:OWNER/NAME'``.
        weights: a pretrained tag of open_clip, a checkpoint file, `'random'` (tests), or None: a tag available on this
            disk.
        pos_embed: encoding that replaces that of the image tower.
        readout: readout of the last block, such as naclip or clearclip(residual=true).
        fingerprint: SHA-256 of the image tower; verified when the model is loaded again.
        tile: side of a tile in pixels; None for the training resolution of the tower.

    Raises:
        OptionError: an invalid readout or tile, a model of another library, or two sources of weights.
    """

    model: str = "ViT-B-16"
    weights: str | None = None
    pos_embed: str | None = None
    readout: str = "naclip"
    fingerprint: str | None = None
    tile: Annotated[int, Interval(least=16)] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_readout(self.readout)
        # names without a prefix are those of open_clip, which have the syntax of timm names
        if kind_of(self.model) not in ("timm", "micro") and check_kind(self.model, ("open_clip",)):
            name = self.model.removeprefix(CLIP)
            name, _, tag = name.partition("/") if ":" not in name else (name, "", None)
            if tag and self.weights:
                raise OptionError(
                    f"weights must not be set for {self.model}, which names its weights, got {self.weights}. Omit it."
                )
            # stored as in files of earlier versions, which have no prefix
            object.__setattr__(self, "model", name)
            object.__setattr__(self, "weights", tag or self.weights)

    @property
    def kind(self) -> str:
        """Kind of features, in addition to those of `FeatureConfig`."""
        return "text"


class TextClassifier:
    """Class probabilities from the similarity of a pixel to the text of each class.

    Args:
        vectors: (K, e) float32, of unit length.
        scale: factor of the similarities before the softmax.

    Raises:
        InputError: there are fewer than two vectors, or a vector does not have unit length.
    """

    kind = "text"
    estimator = None

    def __init__(self, vectors: np.ndarray, scale: float) -> None:
        self.vectors, self.scale = np.ascontiguousarray(vectors, np.float32), float(scale)
        lengths = np.linalg.norm(self.vectors, axis=-1)
        if self.vectors.ndim != 2 or len(self.vectors) < 2 or not np.allclose(lengths, 1, atol=1e-3):
            raise InputError(
                f"a text model needs at least two text vectors of length 1, got {self.vectors.shape} of lengths "
                f"{lengths.min(initial=0):.3g} to {lengths.max(initial=0):.3g}. Check the weights of the towers."
            )
        if not 0 < self.scale < float("inf"):
            raise InputError(f"the scale of a text model must be positive, got {self.scale:g}.")

    @property
    def n_classes(self) -> int:
        """Number of classes, K."""
        return len(self.vectors)

    def planes(self, similarity: np.ndarray) -> np.ndarray:
        """Return probabilities (K, n) float32 of cosine similarities (K, n); columns sum to 1."""
        logits = np.float32(self.scale) * (similarity - similarity.max(axis=0, keepdims=True))
        weight = np.exp(logits, dtype=np.float32)
        return weight / weight.sum(axis=0, keepdims=True)

    def tensors(self) -> dict[str, np.ndarray]:
        """Return the arrays of a model file, by name."""
        return {"text.vectors": self.vectors, "text.scale": np.array([self.scale])}

    @classmethod
    def from_tensors(cls, tensors: dict[str, np.ndarray]) -> TextClassifier:
        """Create the classifier of a model file; InputError for missing or invalid arrays."""
        missing = [name for name in ("text.vectors", "text.scale") if name not in tensors]
        if missing:
            raise InputError(f"a text model lacks {', '.join(missing)}. Create it again.")
        return cls(tensors["text.vectors"], float(tensors["text.scale"].ravel()[0]))
