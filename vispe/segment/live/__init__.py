"""Segmentation that follows the strokes as they are drawn: the engine, and what looks through it."""

from vispe.segment.live.live_segmentation import MAX_CLASSES, Live, micrograph

__all__ = ["MAX_CLASSES", "Live", "micrograph"]
