"""Pixel features: filters, tokens, tiling, caching and assembly."""

from vispe._lazy import lazy_exports

__all__ = ["FeatureConfig", "Features", "PreparedPage", "choose_device"]

__getattr__, __dir__ = lazy_exports(
    __name__,
    dict.fromkeys(("FeatureConfig", "Features", "PreparedPage"), "vispe.segment.features.pixel_features")
    | dict.fromkeys(("choose_device",), "vispe.backbones.device"),
)
