"""Evaluation of a retrofit: the model before and after."""

from vispe._lazy import lazy_exports

__all__ = ["evaluate"]

__getattr__, __dir__ = lazy_exports(__name__, dict.fromkeys(__all__, "vispe.train.evaluate.before_after"))
