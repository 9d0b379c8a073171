"""Figures of encodings, masks and positions."""

from vispe._lazy import lazy_exports

__all__ = ["plot_bias"]

__getattr__, __dir__ = lazy_exports(__name__, dict.fromkeys(__all__, "vispe.evaluate.plots.encoding"))
