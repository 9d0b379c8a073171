"""Pixel features: filters, tokens, tiling, caching and assembly."""

from vispe._lazy import lazy_exports

__all__ = ["FeatureConfig", "Features", "PreparedPage", "choose_device"]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "FeatureConfig": "vispe.segment.features.feature_config",
        "Features": "vispe.segment.features.pixel_features",
        "PreparedPage": "vispe.segment.features.prepared_page",
        "choose_device": "vispe.backbones.device",
    },
)
