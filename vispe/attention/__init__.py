"""Attention with structured biases and transforms: one function with several equivalent backends.

The backends are `reference` (plain float32 or float64), `sdpa` (one dense mask), `lowrank` (a few extra columns of q
and k), `triton` (fused kernels, on CUDA) and `flex` (torch's FlexAttention). Each has `unsupported_reason(call)`, which
returns why it does not support a call or None, and `run(call)`.
"""

from vispe.attention.automatic_backend import Explanation
from vispe.attention.backend_selection import use_backend
from vispe.attention.backends.lowrank import low_rank_approximation
from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.content import ContextBias, GatedBias
from vispe.attention.bias.cross import CrossAttentionBias
from vispe.attention.bias.dense import DenseBias, LowRankBias, SumBias
from vispe.attention.bias.distance_bias import DistanceBias
from vispe.attention.bias.functions import OffsetBias, RadialBias
from vispe.attention.bias.table import ProfileBias, TableBias
from vispe.attention.bias.windows import WindowMask
from vispe.attention.dispatch import attention, explain
from vispe.attention.transform.abstract_transform import Transform
from vispe.attention.transform.affine import Affine
from vispe.attention.transform.blocks import BlockTransform
from vispe.attention.transform.chain import Calibrate, Chain
from vispe.attention.transform.channel_tables import ChannelTables
from vispe.attention.transform.expand import Expand
from vispe.attention.transform.pairs import PairRotation
from vispe.attention.value_term import ValueTerm

__all__ = [
    "Affine",
    "Bias",
    "BlockTransform",
    "Calibrate",
    "Chain",
    "ChannelTables",
    "ContextBias",
    "CrossAttentionBias",
    "DenseBias",
    "DistanceBias",
    "Expand",
    "Explanation",
    "GatedBias",
    "LowRankBias",
    "OffsetBias",
    "PairRotation",
    "ProfileBias",
    "RadialBias",
    "SumBias",
    "TableBias",
    "Transform",
    "ValueTerm",
    "WindowMask",
    "attention",
    "explain",
    "low_rank_approximation",
    "use_backend",
]
