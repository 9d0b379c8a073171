"""Requests to the session of the plugin, and its answers; independent of Qt and napari."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from vispe.images.read import Micrograph
from vispe.segment.classify.pixel_classifier import KINDS
from vispe.segment.features.feature_config import FeatureConfig
from vispe.segment.invariance_report import InvarianceReport
from vispe.segment.live.suggestions import Suggestion
from vispe.segment.model.model_file import Model
from vispe.segment.overlays import Color
from vispe.segment.pipeline import DEFAULT
from vispe.segment.types import Prediction

FEATURES: dict[str, FeatureConfig] = {
    "vispe_micro and filters": DEFAULT,
    "filters": FeatureConfig(),
    "vispe_micro": FeatureConfig("tokens", model=DEFAULT.model),
}
"""Features by their names in the widget; the first are those of `vispe segment`."""


@dataclass(frozen=True, eq=False)
class FeatureSettings:
    """Settings that determine the cached features; any change invalidates them.

    Attributes:
        image: the image, compared by identity.
        features: key of `FEATURES`; unused with a model.
        classifier: `'ensemble'`, `'logistic'`, `'forest'` or `'boosting'`; unused with a model.
        model: an earlier model to start from.
    """

    image: Micrograph
    features: str = next(iter(FEATURES))
    classifier: str = KINDS[0]
    model: Model | None = None

    def is_equivalent(self, other: FeatureSettings | None) -> bool:
        """Return whether the cache of `other` is valid for these settings, too."""
        if other is None or self.image is not other.image or self.model is not other.model:
            return False
        chosen = (self.features, self.classifier) == (other.features, other.classifier)
        return chosen or self.model is not None


@dataclass(frozen=True, eq=False)
class WorkItem:
    """A unit of work.

    Attributes:
        setup: image and settings.
        page: current page, from 0.
        names: class names.
        labels: (h, w) of the page, (z, h, w) of all pages, or None to predict with the existing model; without any
            label, the model of the setup, if any, is used for prediction.
        every: predict every page instead of the current one.
        trust: test whether rotating the page changes the result.
        suggest: suggest locations for the next scribbles on the page.
    """

    setup: FeatureSettings
    page: int = 0
    names: Sequence[str] = ()
    labels: np.ndarray | None = None
    every: bool = False
    trust: bool = False
    suggest: bool = False


@dataclass(eq=False)
class Answer:
    """Result of a request.

    Attributes:
        pages: results by page.
        names: the K class names.
        colors: colours of the model, if it has any, otherwise None.
        notes: messages for the user.
        seconds: computing time.
        trust: the invariance report, if requested.
        suggestions: suggested locations for scribbles, if requested.
        error: a message if the request failed; all other attributes are then empty.
        preview: whether the result is that of the faster `Live.preview_kind`, and the final result follows.
        superseded: whether a newer request interrupted this one, which has no result.
    """

    pages: dict[int, Prediction] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    colors: tuple[Color, ...] | None = None
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    trust: InvarianceReport | None = None
    suggestions: tuple[Suggestion, ...] | None = None
    error: str | None = None
    preview: bool = False
    superseded: bool = False

    def summary(self) -> str:
        """Return the area fraction of each class over all pages of the answer, as text."""
        labels = (p.labels.ravel() for p in self.pages.values())
        counts = sum(np.bincount(page_labels, minlength=len(self.names) + 1) for page_labels in labels)
        total = max(int(np.sum(counts[1:])), 1)
        fractions = zip(self.names, counts[1:], strict=True)
        return ", ".join(f"{name} {100 * n / total:.1f} %" for name, n in fractions)
