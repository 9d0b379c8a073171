"""What encoders of continuous coordinates share: the range of the coordinates, and how they become a table."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vispe.attention.precision import at_least_float32, exact_product
from vispe.encodings.base import Additive
from vispe.errors import OptionError, ShapeError, check_flag, is_whole
from vispe.grid import Positions


class CoordinateEncoder(Additive):
    """Encodes every token's coordinates on their own; final classes say how, by `_encode`.

    Args:
        dim: width of the tokens, d.
        axes: number of coordinates; that of `grid` by default, 2 without it.
        grid: shape of the host's grid.
        normalize: whether `table` divides coordinates by the field of view.
        least: smallest width.
        most: largest number of coordinates; `table` has up to 3.
    """

    def __init__(
        self,
        dim: int,
        axes: int | None,
        grid: Sequence[int] | None,
        normalize: bool,
        least: int = 1,
        most: int = 3,
    ) -> None:
        super().__init__()
        if not is_whole(dim) or dim < least:
            raise OptionError(f"{self.name} needs a width of {least} or more, got dim={dim!r}.")
        check_flag("normalize", normalize)
        if axes is not None and not (is_whole(axes) and 1 <= axes <= most):
            raise OptionError(f"{self.name} reads 1 to {most} coordinates, got axes={axes!r}.")
        if axes is not None and grid is not None and len(grid) != axes:
            raise OptionError(
                f"{self.name} was asked for axes={axes}, but the grid of the model is {tuple(grid)}; leave axes out."
            )
        self.dim, self.axes, self.normalize = dim, axes, normalize
        self.grid = None if grid is None else tuple(grid)
        self.coordinates = axes or (2 if grid is None else len(grid))
        self.ndim = (self.coordinates,)  # pyright: ignore[reportAttributeAccessIssue]  one of what the class accepts

    def encode(self, coords: Tensor) -> Tensor:
        """Return the encoding (..., d) of free coordinates (..., axes), in float32 or better.

        Raises:
            ShapeError: there are more or fewer coordinates than axes.
        """
        self._check(coords)
        return self._encode(at_least_float32(coords), None)

    def table(self, pos: Positions, image: Tensor | None = None) -> Tensor:
        """Return the encoding of every token, (1 or b, n, d) in float32 or better, 0 for prefix tokens."""
        if pos.axes not in self.ndim:
            raise ShapeError(f"{self.name} needs {self.coordinates} axes, got {pos.axes} ({pos}).")
        if next(self.parameters(), None) is None:
            return pos.remember((self.name, repr(self.config)), lambda: self._table(pos))
        return self._table(pos)

    def place(self, pos: Positions) -> Tensor:
        """Return the coordinates that `table` encodes, (1 or b, n, axes).

        With `normalize` those of a grid are the centres of its cells as fractions of the field, in (0, 1), so that
        grids of all sizes cover the same range; free coordinates are divided by `Positions.extent`.
        """
        if not self.normalize:
            return pos.coords
        coords = pos.coords if pos.grid is None else pos.coords + pos.cell[:, None] / 2
        return coords / pos.extent[:, None]

    def _table(self, pos: Positions) -> Tensor:
        return self._encode(self.place(pos), pos) * pos.spatial[..., None]

    def _encode(self, coords: Tensor, pos: Positions | None) -> Tensor:
        raise NotImplementedError

    def _check(self, coords: Tensor) -> None:
        if coords.ndim < 1 or coords.shape[-1] != self.coordinates or not coords.is_floating_point():
            raise ShapeError(
                f"{self.name} encodes floating-point coordinates (..., {self.coordinates}), got "
                f"{tuple(coords.shape)} {coords.dtype}."
            )


def affine(layer: nn.Linear, x: Tensor) -> Tensor:
    """Return ``x W^T + b`` in float32 or better, for parameters of every dtype and under autocast."""
    y = affine_weight(layer, x)
    return y + layer.bias.to(y.dtype)


def affine_weight(layer: nn.Linear, x: Tensor) -> Tensor:
    """Return ``x W^T`` in float32 or better, for parameters of every dtype and under autocast."""
    return exact_product(x, layer.weight.t())


def small_init(layer: nn.Linear) -> None:
    """Draw the weight of a projection to the tokens from a truncated normal of 0.02; the bias is 0."""
    nn.init.trunc_normal_(layer.weight, std=0.02)
    nn.init.zeros_(layer.bias)


def padded(features: Tensor, dim: int) -> Tensor:
    """Return features with zeros behind them up to `dim` channels."""
    return torch.nn.functional.pad(features, (0, dim - features.shape[-1]))
