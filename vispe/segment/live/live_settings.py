"""Settings of a live session: those of the caller, or those of an earlier model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vispe.backbones.hub import downloads
from vispe.errors import InputError, OptionError
from vispe.segment.classify.pixel_classifier import KINDS, PixelClassifier
from vispe.segment.features.feature_cache import CachedFeatures
from vispe.segment.features.feature_config import FeatureConfig
from vispe.segment.model.model_file import Model, load_model
from vispe.segment.pipeline import DEFAULT
from vispe.segment.types import ReadOptions


@dataclass(frozen=True, eq=False)
class LiveSettings:
    """Settings of a session.

    Attributes:
        model: the earlier model, which determines all others; None: none.
        features: features of a pixel.
        classifier: kind of classifier.
        reading: normalisation.
        seed: seed of all random numbers.
    """

    model: Model | None
    features: FeatureConfig
    classifier: str
    reading: ReadOptions
    seed: int

    @classmethod
    def of(
        cls,
        model: Model | str | Path | None,
        features: FeatureConfig | None,
        classifier: str | None,
        reading: ReadOptions | None,
        seed: int | None,
    ) -> LiveSettings:
        """Resolve the arguments of a session, in which None is the default or the setting of the model.

        Raises:
            OptionError: an unknown classifier, an option that the model determines, or filters of volumes.
            InputError: an unusable model file, or a text model.
        """
        loaded = load_model(model) if isinstance(model, str | Path) else model
        if loaded is not None:
            arguments = {"features": features, "classifier": classifier, "reading": reading, "seed": seed}
            conflicts = [name for name, value in arguments.items() if value is not None]
            if conflicts:
                raise OptionError(
                    f"{', '.join(conflicts)} cannot be combined with a model, which determines it."
                )
            features, seed = _pixel_features(loaded), loaded.seed
            classifier = loaded.classifier.kind if loaded.classifier.kind in KINDS else None
            reading = ReadOptions(normalize=loaded.normalize, clip=loaded.clip)
        classifier = classifier or KINDS[0]
        PixelClassifier(classifier, 2)  # validates the name early
        features = features or DEFAULT
        if features.filters_3d:
            raise OptionError(
                "filters_3d needs neighbouring pages, but a live session uses a single page. Omit it, or use vispe "
                "segment and vispe apply."
            )
        return cls(loaded, features, classifier, reading or ReadOptions(), seed or 0)

    def extractor(self, device: str, memory: int) -> CachedFeatures:
        """Return the feature extractor of the session, which caches up to `memory` bytes."""
        basis = None if self.model is None else self.model.basis
        # weights that a model file names are not downloaded without consent
        with downloads(self.model is None or self.features.model in (None, DEFAULT.model)):
            extractor = CachedFeatures(self.features, seed=self.seed, device=device, basis=basis)
        extractor.memory = memory
        return extractor


def _pixel_features(model: Model) -> FeatureConfig:
    """Return the features of a model; InputError for a text model, which cannot learn from labels."""
    if not isinstance(model.features, FeatureConfig):
        raise InputError(
            "the model classifies by text prompts and cannot learn from labels. Use vispe apply."
        )
    return model.features
