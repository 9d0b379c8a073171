"""2D ALiBi: a bias that decreases with the distance between patches (arXiv 2603.16840; ALiBi: arXiv 2108.12409)."""

from __future__ import annotations

from typing import Any, ClassVar

from vispe.encodings.parts.bias.slopes import GridAlibi
from vispe.encodings.registry import register


@register
class Alibi2D(GridAlibi):
    """Attention falls off linearly with the distance between patches.

    bias[h, i, j] = -slope[h] * |p_i - p_j| / divisor          arXiv 2603.16840

    Bare ``alibi2d``, also called ``alibi2d.dinosaw``, has the settings of the released checkpoints: slope 1,
    euclidean, divided by the largest distance, on the torus. ``alibi2d.geometric`` has a different slope per
    head; ``alibi2d.local`` has neither divisor nor torus, so a patch step costs the same at every resolution.
    Computed in `parts/bias/slopes.py`.

    Args:
        num_heads: heads, h.
        depth: blocks of the model, to check `layers`.
        slopes: 'constant' (all 1), 'geometric' (2^(-8k/h), k = 1..h, any h), 'alibi' (the rule of arXiv 2108.12409 for
            head counts that are not powers of two), 'harmonic' (c / k), 'radius' (4.74 / r_k: on a large grid, without
            normalize, the bias alone puts 95 % of the weight within r_k) or 'learned' (h per layer, from U[0, 1)).
            With class-token pooling, the learned slopes of the last block get no gradient: only its class row is
            read, which has no bias.
        softplus: apply softplus to learned slopes, so that they stay positive.
        metric: 'euclidean', 'manhattan', 'chebyshev' or 'squared' (euclidean, squared), in units of the spacing.
        wrap: distances on the torus: per axis min(d, n - d).
        normalize: 'max' divides by the largest distance in the grid (the bias then depends on the
            resolution), 'reference' by that of the reference grid, 'none' not at all.
        reference: (h, w) for normalize='reference'; the grid that the host was built with by default.
        spacing: distance between neighbouring patches per axis, instead of `Grid.spacing`.
        layers: blocks with the bias; all by default.
        jitter: standard deviation of Gaussian noise on the bias, drawn once per forward, in training only.
        biased_heads: number of leading heads with a slope, the others have 0; all by default.
        steepest: c of slopes='harmonic', 1 by default.
        factor: multiplier of the slopes of 'alibi', 'geometric' and 'constant'.
        radius: r of slopes='radius', in units of the distance (fractions of the divisor if there is one): two numbers,
            of the first and the last head, spaced evenly in the logarithm, or one for each head.

    Shapes: pos (n, 2) -> bias (1, h, n, n); prefix rows and columns are 0.
    New resolution: no resampling needed; see `normalize`.   Cost: O(h) memory, O(1) per score.
    Invariant to: translation (on the torus with wrap); rotation by 90 degrees and flips of a square grid.
    Raises: ShapeError if `pos` is not 2-axis; OptionError for incompatible options.
    Differs from the reference: the bias is computed in float32 for every model dtype, is 0 for a 1 x 1 grid (where
        the reference has 0/0), and jitter is off in eval mode and drawn once per forward instead of once per layer.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("alibi2d.geometric", num_heads=2)
        >>> encoding.bias(Grid((2, 3)).positions(), 0).dense().shape
        torch.Size([1, 2, 6, 6])
    """

    name = "alibi2d"
    paper = (
        "What DINO saw: ALiBi positional encoding reduces positional bias, https://arxiv.org/abs/2603.16840"
    )
    year = 2026
    ndim = (2,)
    encodes = ("distance",)
    invariant = ("translation", "quarter_turns", "reflection")
    formula = r"b_{hij} = -m_h \, \frac{\lVert p_i - p_j \rVert}{\mathrm{divisor}}"
    tested_options = (
        "metric=manhattan",
        "metric=chebyshev",
        "metric=squared",
        "metric=squared,wrap=false,normalize=none",
        "wrap=false",
        "normalize=none",
        "normalize=reference,reference=[5,7]",
        "slopes=geometric",
        "slopes=alibi",
        "slopes=learned",
        "slopes=learned,softplus=true",
        "slopes=learned,biased_heads=2",
        "spacing=[2,0.5]",
        "layers=[0,2]",
        "jitter=0.5",
        "biased_heads=2",
        "slopes=radius,radius=[0.2,2],biased_heads=2",
    )
    preset_invariant: ClassVar[dict[str, tuple[str, ...]]] = {
        "local": ("translation", "quarter_turns", "reflection", "rotation")
    }
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "dinosaw": {"slopes": "constant", "metric": "euclidean", "normalize": "max", "wrap": True},
        "geometric": {"slopes": "geometric"},
        "local": {"normalize": "none", "wrap": False},
    }

    slopes = "constant"
    wrap = True
    normalize = "max"
