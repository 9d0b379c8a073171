"""Interactive segmentation: an engine that updates the result as scribbles are drawn, and its front ends."""

from vispe.segment.live.array_image import micrograph
from vispe.segment.live.labelled_pages import MAX_CLASSES
from vispe.segment.live.live_segmentation import Live

__all__ = ["MAX_CLASSES", "Live", "micrograph"]
