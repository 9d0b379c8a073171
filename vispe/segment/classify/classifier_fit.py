"""Training of a calibrated classifier from labelled pixels, for runs on files, on stores and for live sessions."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from vispe.segment.classify.calibration import calibrate
from vispe.segment.classify.pixel_classifier import PixelClassifier
from vispe.segment.features.threads import one_thread_each


def learn(
    kind: str,
    names: Sequence[str],
    features: np.ndarray,
    classes: np.ndarray,
    of: np.ndarray | None,
    seed: int,
    scale: tuple[int, float] | None = None,
) -> tuple[PixelClassifier, dict[str, Any]]:
    """Fit a classifier and calibrate its probabilities.

    Args:
        kind: kind of classifier.
        names: names of the K classes.
        features: (n, f) float32 of the labelled pixels.
        classes: (n,) int, 1..K.
        of: (n,) scribble number of each pixel; None skips the calibration, which fits up to five more classifiers.
        seed: seed of all random numbers.
        scale: factor of the first features for a linear classifier, from `Features.filter_scale`.

    Returns:
        The classifier, and metadata for the model: 'labelled_pixels' by class, and the 'calibration', if any.
    """
    counts = np.bincount(classes, minlength=len(names) + 1)[1:]
    facts: dict[str, Any] = {"labelled_pixels": {n: int(c) for n, c in zip(names, counts, strict=True)}}
    with one_thread_each():
        classifier = PixelClassifier(kind, len(names), seed=seed).fit(features, classes, names, scale)
        if of is not None:
            facts["calibration"] = calibrate(classifier, features, classes, of, seed, names, scale)
    return classifier, facts
