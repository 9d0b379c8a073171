"""Pixel features: filters, tokens, tiling, caching and assembly."""

from vispe._lazy import face

__all__ = ["FeatureConfig", "Features", "PreparedPage", "choose_device"]

__getattr__, __dir__ = face(
    __name__,
    dict.fromkeys(("FeatureConfig", "Features", "PreparedPage"), "vispe.segment.features.pixel_features")
    | dict.fromkeys(("choose_device",), "vispe.backbones.device"),
)
