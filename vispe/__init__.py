"""vispe: positional encodings for vision and multimodal transformers, by name.

Import it before building a model: ``timm.create_model(..., pos_embed='alibi2d')`` works from then on, whichever of
timm and vispe is imported first. timm itself is imported when it is needed.
"""

__version__ = "0.1.0"

import importlib
from typing import TYPE_CHECKING, Any

from vispe import encodings as encodings
from vispe.attention import attention, explain, use_backend
from vispe.base import Additive, Biased, Compose, Encoding, Mixing, Rotary
from vispe.errors import VispeError
from vispe.evaluate.plots import plot_bias
from vispe.grid import Grid, Positions
from vispe.hosts.arrival import await_hosts
from vispe.layers import Attention
from vispe.registry import EncodingInfo, create_encoding, encoding_info, list_encodings, register

if TYPE_CHECKING:
    from vispe import symmetry as symmetry
    from vispe.hosts.convert import convert, describe, restore
    from vispe.hosts.hf_loading import from_pretrained
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
    "from_pretrained",
    "list_encodings",
    "plot_bias",
    "register",
    "restore",
    "symmetrize",
    "use_backend",
]

_FROM = {  # names whose modules import timm, which is slow, or are seldom needed
    "convert": "vispe.hosts.convert",
    "describe": "vispe.hosts.convert",
    "from_pretrained": "vispe.hosts.hf_loading",
    "restore": "vispe.hosts.convert",
    "symmetrize": "vispe.symmetry",
}


def __getattr__(name: str) -> Any:
    if name == "symmetry":
        return importlib.import_module("vispe.symmetry")
    if name not in _FROM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_FROM[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_FROM, "symmetry"})


await_hosts()
