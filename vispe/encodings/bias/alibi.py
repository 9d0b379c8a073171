"""ALiBi in one dimension, two-sided (arXiv 2108.12409; the symmetric form for bidirectional attention)."""

from __future__ import annotations

from vispe.encodings.parts.slopes import AlibiBase
from vispe.encodings.registry import register


@register
class Alibi(AlibiBase):
    """Attention falls off linearly with the distance between tokens of a sequence.

    bias[h, i, j] = -slope[h] * |p_i - p_j|          arXiv 2108.12409, section 3

    Args:
        num_heads: heads, h.
        depth: blocks of the model, to check `layers`.
        slopes: 'alibi' (2^(-8k/h) with the original rule where h is no power of two), 'geometric' (2^(-8k/h) for
            any h), 'constant' (all 1), 'harmonic' (c / k), 'radius' (3.00 / r_k: even attention has 95 % of its weight
            within r_k tokens) or 'learned' (h per layer, from U[0, 1)).
        softplus: learned slopes pass through softplus, so that they stay positive.
        layers: blocks that have the bias; all by default.
        biased_heads: the first so many heads have slopes, the others 0; all by default.
        steepest: c of slopes='harmonic', 1 by default.
        radius: r of slopes='radius', in tokens: two numbers, of the first and the last head, spaced evenly in the
            logarithm, or one for each head.

    Shapes: pos (n, 1) -> bias (1, h, n, n); prefix rows and columns are 0.
    New resolution: no resampling needed; a step costs the same.   Cost: O(h) memory, O(1) per score.
    Invariant to: translation; reversal of the sequence.
    Raises: ShapeError if `pos` is not 1-axis.
    Differs from the reference: two-sided; equal to the causal original under a causal mask.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("alibi", num_heads=2)
        >>> encoding.bias(Grid((6,)).positions(), 0).dense().shape
        torch.Size([1, 2, 6, 6])
    """

    name = "alibi"
    paper = "Train Short, Test Long, https://arxiv.org/abs/2108.12409"
    year = 2021
    ndim = (1,)
    knows = ("distance",)
    invariant = ("translation", "reflection")
