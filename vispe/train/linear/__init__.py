"""Linear segmentation on the patch features of a frozen or fine-tuned backbone."""

from vispe._lazy import face

__all__ = ["linear_segmentation", "main"]

__getattr__, __dir__ = face(__name__, dict.fromkeys(__all__, "vispe.train.linear.command"))
