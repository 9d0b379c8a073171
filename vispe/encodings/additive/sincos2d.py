"""Fixed sines and cosines of both coordinates (MoCo v3, arXiv 2104.02057; MAE; the ablation of arXiv 2603.16840)."""

from __future__ import annotations

import torch
from torch import Tensor

from vispe.encodings.base import Additive
from vispe.encodings.registry import register
from vispe.errors import OptionError, ShapeError
from vispe.grid import Positions


@register
class SinCos2D(Additive):
    """Adds fixed sines and cosines of the row and column to the tokens.

    [sin(y w_k), cos(y w_k), sin(x w_k), cos(x w_k)], w_k = temperature ** (-k / (d / 4)), k = 0 .. d/4 - 1

    Args:
        dim: width of the tokens, d; a multiple of 4.
        temperature: ratio of the longest to the shortest wavelength; the shortest is 2 pi patches.
        std: rescale the values of the whole table to this standard deviation (that of the learned table it
            replaces, say); None keeps them in [-1, 1].

    Shapes: pos.coords (1 or b, n, 2) -> (1 or b, n, d) float32; prefix tokens get 0.
    New resolution: coordinates go on, in patches.   Cost: no parameters, O(n d) per forward.
    Invariant to: nothing; the value at a coordinate does not depend on the rest of the grid (std=None).
    Raises: ShapeError if `pos` is not 2-axis.
    Differs from the reference: coordinates are taken in float32 from the grid, never in the model's dtype.
    """

    name = "sincos2d"
    paper = (
        "An Empirical Study of Training Self-Supervised Vision Transformers, https://arxiv.org/abs/2104.02057"
    )
    year = 2021

    def __init__(self, *, dim: int, temperature: float = 10000.0, std: float | None = None) -> None:
        super().__init__()
        if dim % 4 or dim < 4:
            raise OptionError(f"sincos2d needs a width divisible by 4, got dim={dim}.")
        if not 0 < temperature < float("inf") or not (std is None or 0 < std < float("inf")):
            raise OptionError(f"sincos2d needs positive numbers, got temperature={temperature}, std={std}.")
        self.dim, self.temperature, self.std = dim, temperature, std

    def table(self, pos: Positions, image: Tensor | None = None) -> Tensor:
        """Return the table, (1 or b, n, d) float32, 0 for prefix tokens."""
        if pos.axes != 2:
            raise ShapeError(f"sincos2d needs 2 axes, got {pos.axes} ({pos}).")
        return pos.remember((self.name, self.dim, self.temperature, self.std), lambda: self._table(pos))

    def _table(self, pos: Positions) -> Tensor:
        table = self._waves(pos)
        if self.std is not None:
            whole = pos  # the scale is that of the whole grid, also when tokens are dropped
            if pos.grid is not None and pos.index is not None:
                whole = pos.grid.positions(pos.coords.device)
            waves = table if whole is pos else self._waves(whole)
            placed = whole.spatial[..., None].expand_as(waves)
            count = placed.sum((1, 2), keepdim=True)
            mean = waves.sum((1, 2), keepdim=True) / count
            spread = (((waves - mean) * placed).square().sum((1, 2), keepdim=True) / (count - 1)).sqrt()
            table = table / spread * self.std
        return table

    def _waves(self, pos: Positions) -> Tensor:
        quarter = self.dim // 4
        powers = torch.arange(quarter, dtype=torch.float64, device=_exact(pos.coords)) / quarter
        rates = (self.temperature**-powers).to(pos.coords)
        angle = pos.coords[..., None] * rates  # (b, n, 2, d / 4)
        return torch.stack([angle.sin(), angle.cos()], -2).flatten(2) * pos.spatial[..., None]


def _exact(like: Tensor) -> torch.device:
    """Return where float64 exists: the tensor's device, or the CPU for devices without it."""
    return torch.device("cpu") if like.device.type == "mps" else like.device
