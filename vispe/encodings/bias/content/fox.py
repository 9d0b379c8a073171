"""FoX: forget gates of the tokens on the path reduce attention (arXiv 2503.02130), on lines and images."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from vispe.encodings.parts.bias.cumulative_penalty import PathBias
from vispe.encodings.registry import register
from vispe.utils.options import PositiveFloat


@register
class Fox(PathBias):
    """Attention falls off with the forget gates of the patches on the path, computed from their content.

    bias[h, i, j] = scale * sum over patches m on the path of log sigmoid(w_h . x_m + c_h)          arXiv 2503.02130

    On an image, the path is the mean of the two L-shaped ones, along the row first or down the column first; the gates
    of its two end points count by half. So every patch reads its own row and column, and no n x n tensor is
    needed. Computed in `parts/bias/cumulative_penalty.py`.

    Args:
        dim: width of the tokens, d.
        num_heads: heads, h.
        causal: one axis, looking back, for sequences under a causal mask: the sum is over j < m <= i, and later keys
            must be masked by the caller.
        shared: one gate for steps in all directions; otherwise two, along rows and down columns, and on one axis, as
            in the reference, backward (over j < m <= i) and forward (over i < m <= j).
        gate_bias: start of c; with 5 a step costs 0.007, so a pretrained model is nearly unchanged at first.
        scale: factor of the sum.

    Shapes: pos of a grid (n, 1 or 2), x (b, n, d) -> bias (b, h, n, n); prefix rows and columns are 0.
    New resolution: no resampling needed; gates depend on the patches only. Dropped patches cost nothing.
    Cost: h (d + 1) parameters per layer; O(n (gh + gw)) numbers per head on an image, O(n) on a line.
    Invariant to: translation, rotation by 90 degrees and flips, when patches keep their content; not with shared=false.
    Raises: ShapeError without the tokens x, for tokens without a grid, and for causal=True on an image.
    Differs from the reference: one gate for both directions unless shared=false, half of the gates at the end points;
        images.

    Example:
        >>> import torch
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("fox", dim=16, num_heads=2)
        >>> encoding.bias(Grid((2, 3)).positions(), 0, torch.ones(1, 6, 16)).dense().shape
        torch.Size([1, 2, 6, 6])
    """

    name = "fox"
    paper = "Forgetting Transformer, https://arxiv.org/abs/2503.02130"
    year = 2025
    formula = r"b_{hij} = s \sum_{m \in \mathrm{way}(i, j)} \ln \sigma (w_h \cdot x_m + c_h)"
    tested_options = ("shared=false,scale=0.5", "causal=true,gate_bias=0")

    scale: PositiveFloat = 1.0

    def log_gate(self, z: Tensor) -> Tensor:
        """Return the logarithm of the forget gates."""
        # gates multiply along a path, so their logarithms add up
        return F.logsigmoid(z) * self.scale
