"""Position schemes for streams of text, images and videos.

stream = Stream.of([[Text(5), Image(4, 6), Text(3)]])
coordinates = create_scheme("mrope_i").coordinates(stream)  # .ids (3, 1, 32), .decode(1)
"""

from vispe.multimodal import schemes as schemes
from vispe.multimodal.coordinates import Coordinates
from vispe.multimodal.per_layer import PerLayerSchemes, alternating, pyramid
from vispe.multimodal.registry import (
    SchemeInfo,
    create_scheme,
    list_schemes,
    register_scheme,
    scheme_class,
    scheme_info,
)
from vispe.multimodal.rotary.angles import angles, on_axis, tables
from vispe.multimodal.rotary.channel_layouts import to_half, to_interleaved
from vispe.multimodal.rotary.rotation import rotation
from vispe.multimodal.scheme import Scheme
from vispe.multimodal.schemes.rope_dhr import media_ids
from vispe.multimodal.schemes.v2pe import v2pe_stride_for
from vispe.multimodal.schemes.xdrope import newline_images
from vispe.multimodal.streams.attention_blocks import Blocks
from vispe.multimodal.streams.modix import modix
from vispe.multimodal.streams.parallel_segments import Parallel
from vispe.multimodal.streams.segments import Image, Text, Video
from vispe.multimodal.streams.simultaneous_translation import Streamed, group_mask, streamed
from vispe.multimodal.streams.token_merging import Merged, merge_tokens
from vispe.multimodal.streams.token_stream import Stream
from vispe.multimodal.streams.visual_tokens import VisualTokens

__all__ = [
    "Blocks",
    "Coordinates",
    "Image",
    "Merged",
    "Parallel",
    "PerLayerSchemes",
    "Scheme",
    "SchemeInfo",
    "Stream",
    "Streamed",
    "Text",
    "Video",
    "VisualTokens",
    "alternating",
    "angles",
    "create_scheme",
    "group_mask",
    "list_schemes",
    "media_ids",
    "merge_tokens",
    "modix",
    "newline_images",
    "on_axis",
    "pyramid",
    "register_scheme",
    "rotation",
    "scheme_class",
    "scheme_info",
    "streamed",
    "tables",
    "to_half",
    "to_interleaved",
    "v2pe_stride_for",
]
