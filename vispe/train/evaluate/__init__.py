"""What a retrofit took and what it left."""

from vispe._lazy import face

__all__ = ["evaluate"]

__getattr__, __dir__ = face(__name__, dict.fromkeys(__all__, "vispe.train.evaluate.before_after"))
