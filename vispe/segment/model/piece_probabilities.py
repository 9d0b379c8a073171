"""Class probabilities of the pieces of a page, and the number of pieces computed in parallel."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from vispe.segment.classify.clustering import PixelClusters
from vispe.segment.classify.pixel_classifier import PixelClassifier, predict_in_chunks
from vispe.segment.features.pixel_features import Features
from vispe.segment.features.prepared_page import PreparedPage
from vispe.segment.features.sample_grid import offsets


def piece_threads(features: Features, classifier: PixelClassifier | PixelClusters) -> int:
    """Return the number of pieces computed in parallel: 1 if the device or scikit-learn uses all cores itself."""
    single_threaded = features.device == "cpu" and classifier.kind in ("ensemble", "logistic", "forest")
    return torch.get_num_threads() if single_threaded else 1


def piece_probabilities(
    prepared: PreparedPage,
    number: int,
    valid: np.ndarray,
    classifier: PixelClassifier | PixelClusters,
    look: Callable[[np.ndarray], None] | None = None,
) -> np.ndarray:
    """Classify a piece of a page.

    Args:
        prepared: the page.
        number: index of the piece.
        valid: (rows, columns) bool, its pixels with data.
        classifier: fitted.
        look: function that is called with the features (rows, columns, f) at the points of
            `vispe.segment.features.sample_grid`.

    Returns:
        (K, rows, columns) float32; 0 where there is no data.
    """
    linear = classifier.linear if isinstance(classifier, PixelClassifier) and classifier.is_linear else None
    # linear classifiers are applied before upsampling: K scores per pixel instead of f features
    if linear is not None:
        prob = classifier.probabilities_from_scores(prepared.scores(number, linear, look))
        prob[:, ~valid] = 0
        return prob
    parts = prepared.parts(number)
    if look is not None:
        rows, columns = offsets(prepared.pieces[number])
        look(np.concatenate([part[:, rows[:, None], columns] for part in parts]).transpose(1, 2, 0))
    # avoid the copy of a mask where all pixels have data
    if valid.all():
        return _planes([part.reshape(len(part), -1) for part in parts], classifier).reshape(-1, *valid.shape)
    prob = np.zeros((classifier.n_classes, *valid.shape), np.float32)
    if valid.any():
        prob[:, valid] = _planes([part[:, valid] for part in parts], classifier)
    return prob


def _planes(parts: Sequence[np.ndarray], classifier: PixelClassifier | PixelClusters) -> np.ndarray:
    """Classify parts of the features, each (f', n) -> (K, n)."""
    if isinstance(classifier, PixelClassifier):
        return classifier.of_parts(parts)
    # classifiers of text have a single part
    planes = getattr(classifier, "planes", None)
    if planes is not None:
        return planes(parts[0])
    return predict_in_chunks(parts, classifier.n_classes, classifier.probabilities)
