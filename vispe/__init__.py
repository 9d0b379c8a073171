"""Positional encodings for vision and multimodal transformers, selected by name.

Import vispe before building a model: ``timm.create_model(..., pos_embed='alibi2d')`` then works, independent of the
import order of timm and vispe. timm itself is imported on first use.
"""

from typing import TYPE_CHECKING

from vispe.utils import import_torch as import_torch  # isort: skip  # before any module that imports torch
from vispe import encodings as encodings
from vispe._lazy import lazy_exports, share_namespace
from vispe.attention import attention, explain, use_backend
from vispe.encodings.attention_layer import Attention
from vispe.encodings.base import Additive, Biased, Encoding, Mixing, Rotary
from vispe.encodings.compose import Compose
from vispe.encodings.creation import create_encoding
from vispe.encodings.metadata import EncodingInfo, encoding_info, list_encodings
from vispe.encodings.registry import register
from vispe.errors import VispeError
from vispe.evaluate.plots.encoding import plot_bias
from vispe.grid import Grid, Positions
from vispe.hosts.import_hooks import install_import_hooks
from vispe.utils.version import __version__ as __version__

if TYPE_CHECKING:
    from vispe.evaluate.monitor import monitor
    from vispe.evaluate.plots.explorer.document import explore
    from vispe.evaluate.probe.remedies import debias
    from vispe.hosts.common.block_loops import positions_for
    from vispe.hosts.convert import convert, describe, restore
    from vispe.hosts.fold import fold
    from vispe.hosts.transformers.saving.loading import from_pretrained
    from vispe.images.symmetry.symmetrization import symmetrize

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
    "debias",
    "describe",
    "encoding_info",
    "explain",
    "explore",
    "fold",
    "from_pretrained",
    "list_encodings",
    "monitor",
    "plot_bias",
    "positions_for",
    "register",
    "restore",
    "symmetrize",
    "use_backend",
]

# lazy: modules that import timm, which is slow, or are rarely needed
__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "convert": "vispe.hosts.convert",
        "debias": "vispe.evaluate.probe.remedies",
        "describe": "vispe.hosts.convert",
        "explore": "vispe.evaluate.plots.explorer.document",
        "fold": "vispe.hosts.fold",
        "from_pretrained": "vispe.hosts.transformers.saving.loading",
        "monitor": "vispe.evaluate.monitor",
        "positions_for": "vispe.hosts.common.block_loops",
        "restore": "vispe.hosts.convert",
        "symmetrize": "vispe.images.symmetry.symmetrization",
    },
)
# `import vispe.attention.bias.table as x` finds the submodules of the package that the function hides
share_namespace(attention, "vispe.attention")
install_import_hooks()
