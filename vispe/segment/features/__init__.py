"""What a pixel is described by: filters, tokens, and how they are cut, kept and put together."""

from vispe._lazy import face

__all__ = ["FeatureConfig", "Features", "PreparedPage", "choose_device"]

__getattr__, __dir__ = face(
    __name__,
    dict.fromkeys(("FeatureConfig", "Features", "PreparedPage"), "vispe.segment.features.pixel_features")
    | dict.fromkeys(("choose_device",), "vispe.backbones.device"),
)
