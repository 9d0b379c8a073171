"""3D ALiBi: a bias that decreases with distance in a volume or video (after arXiv 2603.16840, 2108.12409)."""

from __future__ import annotations

from typing import Any, ClassVar

from vispe.encodings.parts.bias.slopes import GridAlibi
from vispe.encodings.registry import register


@register
class Alibi3D(GridAlibi):
    """Attention falls off linearly with the distance between the patches of a volume, or the tubelets of a video.

    bias[h, i, j] = -slope[h] * |p_i - p_j| / divisor          arXiv 2603.16840, with a third axis

    Bare ``alibi3d`` has a different slope per head and no divisor, so a step costs the same in every volume.
    ``alibi3d.dinosaw`` has the settings of the released 2D checkpoints: slope 1, divided by the
    largest distance, on the torus. For anisotropic voxels and tubelets, pass the distance between
    neighbours per axis as `spacing` or `Grid.spacing`, for example (5.0, 0.7, 0.7) mm for a CT.
    Computed in `parts/bias/slopes.py`.

    Args:
        num_heads: heads, h.
        depth: blocks of the model, to check `layers`.
        slopes: 'geometric' (2^(-8k/h), k = 1..h, any h), 'alibi' (the rule of arXiv 2108.12409 for head counts that are
            no power of two), 'constant' (all 1), 'harmonic' (c / k), 'radius' (6.30 / r_k: in a large volume without
            normalize, the bias alone puts 95 % of the weight within r_k) or 'learned' (h per layer, from U[0, 1)).
        softplus: apply softplus to learned slopes, so that they stay positive.
        metric: 'euclidean', 'manhattan', 'chebyshev' or 'squared' (euclidean, squared), in units of the spacing.
        wrap: distances on the torus: per axis min(d, n - d).
        normalize: 'max' divides by the largest distance in the grid (the bias then depends on the
            resolution), 'reference' by that of the reference grid, 'none' not at all.
        reference: (d, h, w) for normalize='reference'; the grid that the host was built with by default.
        spacing: distance between neighbouring patches per axis (d, h, w) or (t, h, w), instead of `Grid.spacing`.
        layers: blocks with the bias; all by default.
        jitter: standard deviation of Gaussian noise on the bias, drawn once per forward, in training only.
        biased_heads: number of leading heads with a slope, the others have 0; all by default.
        steepest: c of slopes='harmonic', 1 by default.
        factor: multiplier of the slopes of 'alibi', 'geometric' and 'constant'.
        radius: r of slopes='radius', in units of the distance (fractions of the divisor if there is one): two numbers,
            of the first and the last head, spaced evenly in the logarithm, or one for each head.

    Shapes: pos (n, 3) -> bias (1, h, n, n); prefix rows and columns are 0.
    New resolution: no resampling needed; see `normalize`.   Cost: O(h) memory, O(1) per score.
    Invariant to: translation (on the torus with wrap); flips along every axis of any grid; with equal spacing also
        permutations of axes, thus all 48 symmetries of a cube.
    Raises: ShapeError if `pos` is not 3-axis; OptionError for incompatible options.
    Differs from the reference: the reference is 2D; on a grid of depth 1 both are equal, option for option.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("alibi3d(spacing=[5,0.7,0.7])", num_heads=2)
        >>> encoding.bias(Grid((2, 3, 2)).positions(), 0).dense().shape
        torch.Size([1, 2, 12, 12])
    """

    name = "alibi3d"
    paper = (
        "What DINO saw: ALiBi positional encoding reduces positional bias, https://arxiv.org/abs/2603.16840"
    )
    year = 2026
    ndim = (3,)
    encodes = ("distance",)
    invariant = ("translation", "quarter_turns", "reflection", "rotation")
    formula = r"b_{hij} = -m_h \, \frac{\lVert p_i - p_j \rVert}{\mathrm{divisor}}"
    tested_options = (
        "metric=manhattan",
        "metric=squared",
        "wrap=true,normalize=max",
        "normalize=reference,reference=[2,5,7]",
        "slopes=constant",
        "slopes=alibi",
        "slopes=learned",
        "slopes=learned,softplus=true,biased_heads=2",
        "spacing=[5,0.7,0.7]",
        "layers=[0,2]",
        "jitter=0.5",
    )
    preset_invariant: ClassVar[dict[str, tuple[str, ...]]] = {
        "dinosaw": ("translation", "quarter_turns", "reflection")
    }
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "dinosaw": {"slopes": "constant", "metric": "euclidean", "normalize": "max", "wrap": True},
    }
