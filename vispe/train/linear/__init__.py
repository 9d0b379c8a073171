"""Linear segmentation on frozen features."""

from vispe._lazy import face

__all__ = ["linear_segmentation", "main"]

__getattr__, __dir__ = face(__name__, dict.fromkeys(__all__, "vispe.train.linear.command"))
