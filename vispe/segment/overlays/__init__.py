"""Figures of results: label maps over their images, and uncertainty maps."""

from vispe.segment.overlays.figure_layout import text_style
from vispe.segment.overlays.label_map import SMALLEST, overlay, uncertainty_image
from vispe.segment.overlays.tint import PALETTE, Color, boundaries, to_rgb

__all__ = [
    "PALETTE",
    "SMALLEST",
    "Color",
    "boundaries",
    "overlay",
    "text_style",
    "to_rgb",
    "uncertainty_image",
]
