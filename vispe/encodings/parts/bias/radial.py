"""Base of biases that are functions of the distance between patches, with options for the metric."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from vispe.attention.bias.distance_metrics import Metric, Normalize
from vispe.attention.bias.functions import RadialBias
from vispe.encodings.base import Biased
from vispe.encodings.parts.resample import training_grid
from vispe.errors import OptionError, counted
from vispe.grid import Positions
from vispe.utils.options import PositiveFloat, PositiveInt, check_per_axis


class RadialEncoding(Biased):
    """Bias that is a function of distance; the options define the distance."""

    fused = True
    ndim = (1, 2, 3)

    num_heads: PositiveInt
    metric: Metric = "euclidean"
    wrap: bool = False
    normalize: Normalize = "none"
    reference: tuple[PositiveInt, ...] | None = None
    spacing: tuple[PositiveFloat, ...] | None = None

    def __post_init__(self) -> None:
        lengths = [len(option) for option in (self.spacing, self.reference) if option is not None]
        if lengths:
            # spacing and reference determine the number of axes
            axes = lengths[0]
            if axes not in self.ndim:
                raise OptionError(
                    f"{self.name} needs {counted(' or '.join(map(str, self.ndim)), 'axis')}, got "
                    f"spacing={self.spacing}, reference={self.reference}."
                )
            check_per_axis("spacing", self.spacing, axes)
            used = self.normalize == "reference"
            self.reference = training_grid(self.reference, axes, used, f"normalize={self.normalize!r}")
            self._accept(axes)

    def _radial(
        self, function: Callable[[Tensor], Tensor], pos: Positions, key: Hashable | None = None
    ) -> RadialBias:
        """Return the bias that is `function` (h, m) of distances (m,)."""
        self._need_axes(pos)
        return RadialBias(
            function,
            pos,
            metric=self.metric,
            wrap=self.wrap,
            normalize=self.normalize,
            reference=self.reference,
            spacing=self.spacing,
            key=key,
            depends_on=None if key is not None else self._sources(getattr(function, "__name__", "")),
        )


def straight_through_clamp(x: Tensor, least: float | None = None, most: float | None = None) -> Tensor:
    """Clamp `x` with a straight-through gradient, so that values outside the limits can return."""
    # value of the clamp, gradient of the identity
    return x + (x.clamp(least, most) - x).detach()


def inverse_softplus(x: Tensor) -> Tensor:
    """Return y with softplus(y) = x, exact for small and large x."""
    # log(exp(x) - 1) without overflow of exp(x)
    return x + torch.log(-torch.expm1(-x))
