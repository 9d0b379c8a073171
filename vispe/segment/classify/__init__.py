"""Classification of pixel features: classifiers, clusters, priors, smoothing."""

from vispe._lazy import face

__all__ = ["Linear", "PixelClassifier", "import_early"]

__getattr__, __dir__ = face(__name__, dict.fromkeys(__all__, "vispe.segment.classify.pixel_classifier"))
