"""Vision towers of open_clip."""

from vispe._lazy import lazy_exports

__all__ = [
    "convert_image_tower",
    "convert_tower",
    "describe_tower",
    "image_tower",
    "restore_image_tower",
    "restore_tower",
]

__getattr__, __dir__ = lazy_exports(__name__, dict.fromkeys(__all__, "vispe.hosts.open_clip.convert"))
