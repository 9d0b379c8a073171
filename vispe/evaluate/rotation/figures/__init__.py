"""Figures and HTML report of `vispe rotate`."""

from vispe._lazy import lazy_exports

__all__ = ["fingerprint_words", "plot_fingerprint", "plot_label_poses", "plot_poses"]

__getattr__, __dir__ = lazy_exports(
    __name__, dict.fromkeys(__all__, "vispe.evaluate.rotation.figures.image_grids")
)
