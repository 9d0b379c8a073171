"""BAM: a generalised Gaussian of the offset as attention prior (arXiv 2505.22842)."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from vispe.attention.bias.abstract_bias import Bias
from vispe.encodings.parts.bias.bam_prior import PriorEncoding
from vispe.encodings.registry import register
from vispe.grid import Positions


@register
class Bam(PriorEncoding):
    """Attention falls off as a generalised Gaussian whose width and tail every head learns.

    bias = -(|p_j - p_i - mu_h| + eps)^beta_h exp(a_h), mu_h = 2 sinh(l_h)          arXiv 2505.22842

    beta 1 is ALiBi, 2 a Gaussian, below 1 heavy-tailed, and 0 a head without position. Bare ``bam`` starts as ALiBi
    and ``bam.linear`` with tails from 0 to 1, as the authors' models. ``bam.gaussian`` fixes beta to 2: a learned
    Gaussian. ``bam.offset`` also learns the location mu of the peak of every head, for grids of 2 axes.
    Computed in `parts/bias/bam_prior.py`.

    Args:
        num_heads: heads, h.
        axes: number of grid axes; any by default, but required for train_loc, loc_init and axis_scale.
        shape_init: beta at the start: a number, or 'linear': from 0 to 1 over the heads.
        train_shape: whether beta is learned. Values below 0 act as 0.
        scale_init: 'slope': exp(a) are the slopes of ALiBi at the start; a number s: 1 / s.
        axis_scale: also learn a factor per head and axis of the offsets from mu, initialised with 1.
        train_loc: whether mu is learned, per head and axis.
        loc_init: l at the start, on every axis.
        eps: added to the distance.
        wrap: offsets on the torus.
        spacing: distance between neighbouring patches per axis, instead of `Grid.spacing`.

    Shapes: pos (n, axes) -> bias (1, h, n, n); prefix rows and columns are 0.
    New resolution: no resampling needed; a step costs the same.   Cost: 2 h parameters per layer, h more for each axis
        with train_loc or axis_scale; O(1) per score. The outputs of a pretrained model change at the start.
    Invariant to: translation, rotation by any angle, flips; translation alone with train_loc or axis_scale.
    Raises: ShapeError if `pos` has other axes; OptionError for incompatible options.
    Differs from the reference: two-sided and on grids, equal to the original under a causal mask; beta stays 0 or more.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("bam.gaussian", num_heads=2)
        >>> encoding.bias(Grid((2, 3)).positions(), 0).dense().shape
        torch.Size([1, 2, 6, 6])
    """

    name = "bam"
    paper = "Bayesian Attention Mechanism, https://arxiv.org/abs/2505.22842"
    year = 2025
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "linear": {"shape_init": "linear"},
        "gaussian": {"shape_init": 2.0, "train_shape": False},
        "offset": {"shape_init": 2.0, "train_shape": False, "train_loc": True, "axes": 2},
    }
    encodes = ("distance",)
    invariant = ("translation", "quarter_turns", "reflection", "rotation")
    formula = (
        r"b_{hij} = -\left( |p_j - p_i - \mu_h| + \varepsilon \right)^{\beta_h} e^{a_h}, \quad \mu_h = 2 "
        r"\sinh l_h"
    )
    tested_options = (
        "train_loc=true,axis_scale=true,axes=3",
        "shape_init=0.5,train_shape=false,wrap=true",
        "scale_init=4,eps=0.1,spacing=[2,0.5]",
    )
    preset_invariant: ClassVar[dict[str, tuple[str, ...]]] = {"offset": ("translation",)}

    def bias(self, pos: Positions, layer: int, x: Tensor | None = None) -> Bias | None:
        """Return the bias, the same for every block that has these parameters."""
        return self._prior(pos)
