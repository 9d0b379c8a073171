"""CARoPE: rotary frequencies per head computed from the tokens (in the style of arXiv 2507.23083)."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vispe.attention.precision import exact_product
from vispe.encodings.parts.layers import PreciseLinear
from vispe.encodings.parts.rotary.context import ContextRotary, heads_of
from vispe.encodings.parts.rotary.rope.axial_pairs import even_counts
from vispe.encodings.registry import register
from vispe.errors import OptionError
from vispe.grid import Positions
from vispe.utils.constants import constant


@register
class Carope(ContextRotary):
    """Rotation by content-dependent frequencies per head, which shift positions or are summed along a sequence.

    f_h(x) = 1 / (1 + softplus(w_h . x + b_h)), between 0 and 1          in the style of arXiv 2507.23083
    scan:  angle_t of pair c = sum over s <= t of f_h(x_s)^(c + 1)
    field: angle of pair c = w_c . p + pi (f_h(x)^(c + 1) - f^(c + 1))          on grids, ours

    Experimental: the paper has no public code and is not specific enough to be reproduced exactly, so the authors'
    models cannot be loaded. It starts as RoPE: w_h is 0, and b_h sets each f_h to f = base^(-1 / C) with C
    pairs per head. The field adds at most pi.

    Args:
        dim: width of the tokens, d.
        num_heads: heads, h.
        head_dim: channels of a head, d_h; dim / num_heads by default.
        form: 'field' on 1 to 3 axes, or 'scan' along one, as in the paper, where attention usually is causal.
        base: ratio of the first to the (C + 1)-th frequency of an axis.
        layout: which channels are a pair: 'half' c and c + pairs, 'interleaved' 2c and 2c + 1.
        spacing: distance between neighbouring patches per axis, instead of `Grid.spacing`; of a field.

    Presets: ``carope.scan`` is the scan with the base of language models, 10000.

    Shapes: pos (n, axes), x (b, n, d) -> tables (b, h, n, pairs); prefix tokens are neither rotated nor part of a scan.
    New resolution: a field is extrapolated as RoPE, a scan by its sums.   Cost: h (d + 1) parameters per layer, and
        tables for every image.
    Invariant to: translation in scores between patches, each with its content; norms are preserved.
    Raises: ShapeError without the tokens x, or for a scan of other numbers of axes than 1 or of dropped tokens;
        OptionError for incompatible options.
    Differs from the reference: see above; the first pair of a scan starts at frequency f, not at 1.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("carope", dim=16, num_heads=2)
        >>> turn = encoding.transform(Grid((2, 3)).positions(), 0, torch.ones(1, 6, 16))
        >>> turn.query(torch.ones(1, 2, 6, 8)).shape
        torch.Size([1, 2, 6, 8])
    """

    name = "carope"
    paper = "Context-aware Rotary Position Embedding, https://arxiv.org/abs/2507.23083"
    year = 2025
    presets: ClassVar[dict[str, dict[str, Any]]] = {"scan": {"form": "scan", "base": 10000.0}}
    encodes = ("distance", "direction", "content")
    invariant = ("translation",)
    formula = (
        r"f_h(x) = \frac{1}{1 + \operatorname{softplus}(w_h \cdot x + b_h)}, \quad \theta_{tc} = \sum_{s "
        r"\le t} f_h(x_s)^{c + 1}"
    )
    tested_options = ("form=scan,layout=interleaved", "base=20,spacing=[2,0.5]")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.base <= 1:
            raise OptionError(
                f"carope needs a base above 1, of frequencies below 1, got base={self.base:g}. Use a larger "
                f"base."
            )
        self.frequency = PreciseLinear(self.dim, self.num_heads)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weights to 0 and the biases so that every frequency is that of RoPE on one axis."""
        nn.init.zeros_(self.frequency.weight)
        # softplus(b) = 1 / f - 1, solved for b without overflow
        rise = self.base ** (1 / self.pairs) - 1
        nn.init.constant_(self.frequency.bias, rise + math.log(-math.expm1(-rise)))

    def _powers(self, x: Tensor, power: Tensor) -> Tensor:
        """Return f_h ** power (b, h, n, pairs) of the tokens."""
        rise = nn.functional.softplus(self.frequency(x))
        # log f = -log(1 + rise), times the powers of all pairs of its head
        identity = torch.eye(self.num_heads, dtype=rise.dtype, device=rise.device)
        # (h, h * pairs): block diagonal, so that each head has its own exponents
        exponents = torch.kron(identity, power.to(rise)[None])
        return heads_of(exact_product(-torch.log1p(rise), exponents).exp(), self.num_heads)

    def _field(self, x: Tensor, pos: Positions) -> Tensor:
        # the last axis (x) has the first pairs
        counts = even_counts(self.pairs, pos.axes)[::-1]
        power = constant(tuple(c + 1 for n in counts for c in range(n)), x.dtype, x.device)
        start = self.base ** (-power / self.pairs)
        return math.pi * (self._powers(x, power) - start)

    def _steps(self, x: Tensor, spatial: Tensor) -> Tensor:
        return self._powers(x, torch.arange(1, self.pairs + 1, dtype=x.dtype, device=x.device))
