"""Base of `bam` and `bam_ssmax`: generalised Gaussian bias with learned shape, scale and location (2505.22842)."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from vispe.attention.bias.functions import OffsetBias
from vispe.attention.precision import at_least_float32
from vispe.encodings.base import Biased
from vispe.encodings.parts.bias.radial import straight_through_clamp
from vispe.encodings.parts.bias.slopes import fixed_slopes
from vispe.errors import OptionError
from vispe.grid import Positions
from vispe.utils.options import (
    Axes,
    FiniteFloat,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    check_per_axis,
)


class PriorEncoding(Biased):
    """Generalised Gaussian bias of the offset between two patches."""

    fused = True
    ndim = (1, 2, 3)

    num_heads: PositiveInt
    axes: Axes | None = None
    shape_init: NonNegativeFloat | Literal["linear"] = 1.0
    train_shape: bool = True
    scale_init: PositiveFloat | Literal["slope"] = "slope"
    axis_scale: bool = False
    train_loc: bool = False
    loc_init: FiniteFloat = 0.0
    eps: PositiveFloat = 1e-5
    wrap: bool = False
    spacing: tuple[PositiveFloat, ...] | None = None

    def __post_init__(self) -> None:
        axes = self.axes or (None if self.spacing is None else len(self.spacing))
        if axes is not None:
            check_per_axis("spacing", self.spacing, axes)
            self._accept(axes)
        located = self.train_loc or self.loc_init != 0.0
        if axes is None and (located or self.axis_scale):
            raise OptionError(
                f"{self.name} needs axes, the number of grid axes, "
                "for a location or scale per axis, got None. Use axes=2."
            )
        heads = self.num_heads
        self.shape = nn.Parameter(torch.empty(heads)) if self.train_shape else nn.Buffer(torch.empty(heads))
        self.scale = nn.Parameter(torch.empty(heads))
        kind = nn.Parameter if self.train_loc else nn.Buffer
        self.loc = kind(torch.empty(heads, axes or 0)) if located else None
        self.stretch = nn.Parameter(torch.empty(heads, axes or 0)) if self.axis_scale else None
        self.reset_parameters()

    @property
    def per_layer(self) -> bool:
        """True: every layer has its own shapes and scales."""
        return True

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the parameters to the values of the options; deterministic."""
        heads = self.num_heads
        linear = torch.linspace(0.0, 1.0, heads)
        self.shape.copy_(linear if self.shape_init == "linear" else torch.full((heads,), self.shape_init))
        slope = self.scale_init == "slope"
        scales = fixed_slopes("alibi", heads) if slope else (1.0 / float(self.scale_init),) * heads
        # stored as logarithms, so that scales remain positive
        self.scale.copy_(torch.tensor([math.log(s) for s in scales]))
        if self.loc is not None:
            nn.init.constant_(self.loc, self.loc_init)
        if self.stretch is not None:
            nn.init.zeros_(self.stretch)

    def _prior(self, pos: Positions) -> OffsetBias:
        self._need_axes(pos)
        return OffsetBias(self._fall, pos, wrap=self.wrap, spacing=self.spacing, depends_on=self._sources())

    def _fall(self, step: Tensor) -> Tensor:
        """Return the logarithm of the prior (h, m) at offsets (m, axes)."""
        step = step[None]
        if self.loc is not None:  # location of the peak of each head
            # 2 sinh: linear near 0 and exponential for distant locations
            step = step - 2.0 * at_least_float32(self.loc)[:, None].sinh()
        if self.stretch is not None:
            step = step * at_least_float32(self.stretch)[:, None].exp()
        length = torch.linalg.vector_norm(step, dim=-1)
        # a shape below 0 would be infinite at distance 0
        shape = straight_through_clamp(at_least_float32(self.shape), 0.0)[:, None]
        # eps: powers below 1 have an infinite gradient at 0
        return -((length + self.eps) ** shape) * at_least_float32(self.scale)[:, None].exp()
