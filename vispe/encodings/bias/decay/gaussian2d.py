"""NACLIP's prior: a Gaussian of the distance added to the attention logits (arXiv 2404.08181)."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.dense_request import DenseRequest
from vispe.attention.bias.distance_metrics import Metric, distances, offsets
from vispe.encodings.base import Biased
from vispe.encodings.registry import register
from vispe.errors import OptionError
from vispe.grid import Grid, Positions
from vispe.utils.options import FiniteFloat, Integer, PositiveFloat, PositiveInt, check_per_axis


class GaussianBias(Bias):
    """``amplitude * exp(-|p_i - p_j|^2 / (2 sigma^2))``, one for all heads; prefix rows and columns are 0.

    Args:
        sigma: standard deviation, in units of the spacing.
        amplitude: the value at distance 0.
        wrap: distances on the torus.
        spacing: distance between neighbouring cells per axis, instead of that of the positions.
        pos: positions of the tokens.
    """

    __slots__ = ("amplitude", "sigma", "spacing", "wrap")

    def __init__(
        self, sigma: float, amplitude: float, wrap: bool, spacing: tuple[float, ...] | None, pos: Positions
    ) -> None:
        super().__init__(pos)
        self.sigma, self.amplitude, self.wrap, self.spacing = sigma, amplitude, wrap, spacing

    @property
    def invariant(self) -> bool:
        """True: the bias depends on offsets only."""
        return True

    @property
    def per_head(self) -> bool:
        """False: heads share the bias."""
        return False

    @property
    def key(self) -> Hashable | None:
        """Cache key of equal biases, or None if positions need gradients."""
        # positions with a gradient need a new bias in every step
        free = self.pos is None or self.pos.static
        return ("gaussian", self.sigma, self.amplitude, self.wrap, self.spacing) if free else None

    @property
    def finite(self) -> bool:
        """True: no entry is infinite."""
        return True

    def _dense(self, request: DenseRequest) -> Tensor:
        spacing = self.spacing
        pos_q, pos_k = (
            p if spacing is None else p.with_spacing(spacing) for p in request.positions(self.pos)
        )
        # squared distances, without a square root, whose gradient at 0 is infinite
        squared = distances(pos_q, pos_k, SQUARED, self.wrap, "none")
        valid = pos_q.spatial[:, :, None] & pos_k.spatial[:, None]
        # one map for all heads: (b or 1, n, m) -> (b or 1, 1, n, m)
        return self._profile(squared).masked_fill(~valid, 0.0)[:, None]

    def table(self, grid: Grid) -> Tensor:
        """Return the bias of every offset of a grid, (1, 2 h - 1, 2 w - 1)."""
        device = None if self.pos is None else self.pos.coords.device
        # offsets in units of the requested spacing
        grid = grid if self.spacing is None else replace(grid, spacing=self.spacing)
        return self._profile(offsets(grid, SQUARED, self.wrap, "none", device=device))[None]

    def _profile(self, squared: Tensor) -> Tensor:
        return self.amplitude * torch.exp(squared / (-2.0 * self.sigma**2))


SQUARED: Metric = "squared"


@register
class Gaussian2D(Biased):
    """Raises attention to the neighbourhood of a patch by a Gaussian of the distance.

    bias[i, j] = amplitude * exp(-|p_i - p_j|^2 / (2 sigma^2))          arXiv 2404.08181, section 3

    ``gaussian2d.naclip`` is the published setting for training-free segmentation: sigma 5, on the last block.

    Args:
        sigma: standard deviation, in units of the spacing (patches by default).
        amplitude: the value at distance 0; it decays to 0. Negative values push attention outwards.
        wrap: distances on the torus: per axis min(d, n - d).
        spacing: distance between neighbouring patches per axis, instead of `Grid.spacing`.
        layers: blocks that have the bias; negative numbers count from the last, which needs `depth`; all by default.
        depth: blocks of the model, supplied by the host.

    Shapes: pos (n, 2) -> bias (1, 1, n, n), the same for all heads; prefix rows and columns are 0.
    New resolution: no resampling needed; sigma stays in patches.   Cost: no parameters, O(1) per score.
    Invariant to: translation (on the torus with wrap); rotation by 90 degrees and flips of a square grid.
    Raises: ShapeError if `pos` is not 2-axis; OptionError for incompatible options.
    Differs from the reference: NACLIP also replaces queries by keys and drops the residual and MLP of the
        last block; this is only its bias, which works in every model.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> encoding = create_encoding("gaussian2d")
        >>> encoding.bias(Grid((2, 3)).positions(), 0).dense().shape
        torch.Size([1, 1, 6, 6])
    """

    name = "gaussian2d"
    paper = "Pay Attention to Your Neighbours, https://arxiv.org/abs/2404.08181"
    year = 2024
    ndim = (2,)
    encodes = ("distance",)
    invariant = ("translation", "quarter_turns", "reflection", "rotation")
    formula = r"b_{ij} = A \exp \left( - \frac{\lVert p_i - p_j \rVert^2}{2 \sigma^2} \right)"
    tested_options = ("sigma=0.7,amplitude=-3", "wrap=true", "spacing=[2,0.5]", "layers=[0,-2]")
    presets: ClassVar[dict[str, dict[str, Any]]] = {"naclip": {"sigma": 5.0, "layers": [-1]}}
    fused = True

    sigma: PositiveFloat = 5.0
    amplitude: FiniteFloat = 1.0
    wrap: bool = False
    spacing: tuple[PositiveFloat, ...] | None = None
    layers: tuple[Integer, ...] | None = None
    depth: PositiveInt | None = None

    def __post_init__(self) -> None:
        check_per_axis("spacing", self.spacing, 2)
        depth, layers = self.depth, self.layers or ()
        if depth is None and any(i < 0 for i in layers):
            raise OptionError(
                f"layers={list(layers)} counts from the last block and needs depth, got None. Pass depth."
            )
        # negative indices count from the last block
        outside = [i for i in layers if depth is not None and not -depth <= i < depth]
        if outside:
            raise OptionError(f"layers must be block indices below depth={depth}, got {outside}.")

    def active(self, layer: int) -> bool:
        """Whether block `layer` has the bias."""
        return self.layers is None or layer in [i + (self.depth or 0) if i < 0 else i for i in self.layers]

    def bias(self, pos: Positions, layer: int, x: Tensor | None = None) -> Bias | None:
        """Return the bias of block `layer`; None if `layers` excludes it."""
        self._need_axes(pos)
        if not self.active(layer):
            return None
        return GaussianBias(self.sigma, self.amplitude, self.wrap, self.spacing, pos)
