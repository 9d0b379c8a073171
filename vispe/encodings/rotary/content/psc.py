"""Phase Shift Calibration: content-dependent scaling of query and key channels before any rotation."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from vispe.attention.precision import at_least_float32
from vispe.attention.transform.chain import Calibrate
from vispe.encodings.base import Rotary
from vispe.encodings.registry import register
from vispe.grid import Positions
from vispe.utils.options import PositiveInt


@register
class Psc(Rotary):
    """Scales channels of queries and keys by their content, so that the rotation that follows can remain frozen.

    q_i -> q_i (1 + tanh(silu(q_i U_h) V_h) / 2), keys likewise with separate U and V          arXiv 2505.12423

    It does not use positions: it adapts models with a frozen rotation to a resolution that they were not
    trained at. ``psc+rope_axial`` applies it before the rotation. It is initially the identity, with U = 0.

    Args:
        dim: width of the tokens, d.
        num_heads: heads, h.
        head_dim: channels of a head, d_h; dim / num_heads by default.

    Shapes: queries and keys (b, h, n, d_h) keep their width; class and register tokens are calibrated like
        patches, since positions are not used.
    New resolution: nothing depends on it.   Cost: 4 h d_h^2 parameters per layer; as many products per token.
    Invariant to: all changes of positions.
    Raises: OptionError if dim is not a multiple of num_heads.
    Differs from the reference: weights are drawn according to d_h, V from +-1 / sqrt(d_h). V has
        no gradient until U differs from 0, as in the reference.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("psc+rope_axial", dim=16, num_heads=2)
        >>> encoding.transform(Grid((2, 3)).positions(), 0).query(torch.ones(1, 2, 6, 8)).shape
        torch.Size([1, 2, 6, 8])
    """

    name = "psc"
    paper = "PSC: Extending Context Window of Large Language Models via Phase Shift Calibration, https://arxiv.org/abs/2505.12423"
    year = 2025
    ndim = (1, 2, 3)
    scales_channels: ClassVar[bool] = True
    encodes = ("content",)
    invariant = ("translation", "quarter_turns", "reflection", "rotation")
    formula = (
        r"q_i \to q_i \left( 1 + \tfrac{1}{2} \tanh \left( \operatorname{silu}(q_i U_h) V_h \right) "
        r"\right)"
    )

    dim: PositiveInt
    num_heads: PositiveInt
    head_dim: PositiveInt | None = None

    def __post_init__(self) -> None:
        width = self._resolve_head_dim()
        # `up` is U and `down` is V of the formula, one matrix per head
        shape = (self.num_heads, width, width)
        self.q_up, self.q_down = nn.Parameter(torch.empty(shape)), nn.Parameter(torch.empty(shape))
        self.k_up, self.k_down = nn.Parameter(torch.empty(shape)), nn.Parameter(torch.empty(shape))
        self.reset_parameters()

    @property
    def per_layer(self) -> bool:
        """True: every layer has its own matrices."""
        return True

    def reset_parameters(self) -> None:
        """Set U to 0 and draw V: the identity."""
        for name, matrix in self.named_parameters():
            # only U is 0: with V = 0 as well, neither would have a gradient
            bound = 1 / math.sqrt(matrix.shape[-1])
            nn.init.zeros_(matrix) if name.endswith("up") else nn.init.uniform_(matrix, -bound, bound)

    def transform(self, pos: Positions, layer: int, x: Tensor | None = None) -> Calibrate:
        """Return the calibration of queries and keys, the same for all tokens."""
        self._need_axes(pos)
        return Calibrate(*(at_least_float32(m) for m in (self.q_up, self.q_down, self.k_up, self.k_down)))
