"""Classification of pixel features: classifiers, clusters, priors, smoothing."""

from vispe._lazy import lazy_exports

__all__ = ["Linear", "PixelClassifier", "import_early"]

__getattr__, __dir__ = lazy_exports(
    __name__,
    dict.fromkeys(__all__, "vispe.segment.classify.pixel_classifier")
    | {"Linear": "vispe.segment.classify.estimators.linear"},
)
