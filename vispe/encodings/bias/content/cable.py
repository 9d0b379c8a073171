"""Cable: ALiBi with content-dependent step costs (context-aware biases), on lines and images."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from vispe.encodings.parts.bias.cumulative_penalty import PathBias
from vispe.encodings.registry import register


@register
class Cable(PathBias):
    """Attention falls off with the content-dependent costs of the patches on the path: ALiBi with learned step costs.

    bias[h, i, j] = -sum over patches m on the path of softplus(w_h . x_m + c_h)          arXiv 2503.08067

    The paths are those of `fox`, of which this is the form with the signs of w and c reversed; see
    `parts/bias/cumulative_penalty.py`.

    Args:
        dim: width of the tokens, d.
        num_heads: heads, h.
        causal: one axis, looking back, for sequences under a causal mask: the sum is over j < m <= i, and later keys
            must be masked by the caller.
        shared: one cost for steps in all directions; otherwise two, along rows and down columns, and on one axis
            backward (over j < m <= i) and forward (over i < m <= j).
        gate_bias: start of c; with -5 a step costs 0.007, so a pretrained model is nearly unchanged at first.

    Shapes: pos of a grid (n, 1 or 2), x (b, n, d) -> bias (b, h, n, n); prefix rows and columns are 0.
    New resolution: no resampling needed; costs depend on the patches only. Dropped patches cost nothing.
    Cost: h (d + 1) parameters per layer; O(n (gh + gw)) numbers per head on an image, O(n) on a line.
    Invariant to: translation, rotation by 90 degrees and flips, when patches keep their content; not with shared=false.
    Raises: ShapeError without the tokens x, for tokens without a grid, and for causal=True on an image.
    Differs from the reference: products of queries and keys are scaled as in the model, while the authors do not scale
        them; bidirectional paths and images.

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
    formula = r"b_{hij} = - \sum_{m \in \mathrm{way}(i, j)} \operatorname{softplus}(w_h \cdot x_m + c_h)"
    tested_options = ("shared=false", "causal=true,gate_bias=0")

    gate_bias = -5.0

    def log_gate(self, z: Tensor) -> Tensor:
        """Return minus the cost of every token."""
        return F.logsigmoid(-z)  # -softplus(z)
