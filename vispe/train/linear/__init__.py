"""Linear segmentation on the patch features of a frozen or fine-tuned backbone."""

from vispe._lazy import lazy_exports

__all__ = ["linear_segmentation", "main"]

__getattr__, __dir__ = lazy_exports(__name__, dict.fromkeys(__all__, "vispe.train.linear.command"))
