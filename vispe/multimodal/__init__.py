"""Positions of multimodal sequences: streams of text, images and videos, and schemes that give them coordinates.

stream = Stream.of([[Text(5), Image(4, 6), Text(3)]])
coordinates = create_scheme("mrope_i").coordinates(stream)  # .ids (3, 1, 32), .decode(1)
"""

from vispe.multimodal import schemes as schemes
from vispe.multimodal.registry import create_scheme, list_schemes, register_scheme, scheme_class
from vispe.multimodal.rotary import angles, rotation, tables, to_half, to_interleaved
from vispe.multimodal.scheme import Coordinates, Scheme, VisualTokens
from vispe.multimodal.segments import Image, Text, Video
from vispe.multimodal.stream import Blocks, Stream

__all__ = [
    "Blocks",
    "Coordinates",
    "Image",
    "Scheme",
    "Stream",
    "Text",
    "Video",
    "VisualTokens",
    "angles",
    "create_scheme",
    "list_schemes",
    "register_scheme",
    "rotation",
    "scheme_class",
    "tables",
    "to_half",
    "to_interleaved",
]
