"""Cable: ALiBi whose steps cost what the tokens say (context-aware biases), on lines and on images."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from vispe.encodings.parts.cumulative_penalty import PathBias
from vispe.encodings.registry import register


@register
class Cable(PathBias):
    """Attention falls off with what the patches on the way cost: ALiBi whose every step has a price of its own.

    bias[h, i, j] = -sum over patches m on the way of softplus(w_h . x_m + c_h)          arXiv 2503.08067

    The ways are those of `fox`, of which this is the form with the other sign of w and c.

    Args:
        dim: width of the tokens, d.
        num_heads: heads, h.
        causal: one axis, looking back, for sequences under a causal mask: the sum is over j < m <= i, and what is later
            has to be masked by the caller.
        shared: one price for steps in all directions; otherwise two, along rows and down columns, and on one axis
            looking back (over j < m <= i) and ahead (over i < m <= j).
        gate_bias: start of c; with -5 a step costs 0.007, so a pretrained model starts near what it was.

    Shapes: pos of a grid (n, 1 or 2), x (b, n, d) -> bias (b, h, n, n); prefix rows and columns are 0.
    New resolution: no resampling needed; a patch costs what it says. Dropped patches cost nothing.
    Cost: h (d + 1) parameters per layer; O(n (gh + gw)) numbers per head on an image, O(n) on a line.
    Invariant to: translation, rotation by 90 degrees and flips, when patches keep their content; not with shared=false.
    Raises: ShapeError without the tokens x, for tokens of no grid, and for causal=True on an image.
    Differs from the reference: products of queries and keys keep the scale of the model, where the authors' have none;
        ways to both sides and images.

    Example:
        >>> import torch
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("cable", dim=16, num_heads=2)
        >>> encoding.bias(Grid((2, 3)).positions(), 0, torch.ones(1, 6, 16)).dense().shape
        torch.Size([1, 2, 6, 6])
    """

    name = "cable"
    paper = "Context-aware Biases for Length Extrapolation, https://arxiv.org/abs/2503.08067"
    year = 2025

    gate_bias = -5.0

    def log_gate(self, z: Tensor) -> Tensor:
        """Return minus the price of every token."""
        return F.logsigmoid(-z)  # -softplus(z)
