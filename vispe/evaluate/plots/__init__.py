"""Figures of encodings, masks and positions."""

from vispe._lazy import face

__all__ = ["plot_bias"]

__getattr__, __dir__ = face(__name__, dict.fromkeys(__all__, "vispe.evaluate.plots.encoding"))
