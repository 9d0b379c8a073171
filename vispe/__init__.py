"""vispe: positional encodings for vision and multimodal transformers, by name.

Import it before building a model: ``timm.create_model(..., pos_embed='alibi2d')`` works from then on.
"""

__version__ = "0.1.0"

from vispe import encodings as encodings
from vispe.attention import attention, explain
from vispe.base import Additive, Biased, Compose, Encoding, Mixing, Rotary
from vispe.errors import VispeError
from vispe.evaluate.plots import plot_bias
from vispe.grid import Grid, Positions
from vispe.hosts import front_door
from vispe.hosts.convert import convert, describe, restore
from vispe.layers import Attention
from vispe.registry import EncodingInfo, create_encoding, encoding_info, list_encodings, register
from vispe.symmetry import symmetrize

__all__ = [
    "Additive",
    "Attention",
    "Biased",
    "Compose",
    "Encoding",
    "EncodingInfo",
    "Grid",
    "Mixing",
    "Positions",
    "Rotary",
    "VispeError",
    "attention",
    "convert",
    "create_encoding",
    "describe",
    "encoding_info",
    "explain",
    "list_encodings",
    "plot_bias",
    "register",
    "restore",
    "symmetrize",
]

front_door.install()
