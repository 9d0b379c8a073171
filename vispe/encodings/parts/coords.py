"""Base of additive encoders of continuous coordinates: coordinate ranges and tables."""

from __future__ import annotations

import torch
from torch import Tensor

from vispe.attention.precision import at_least_float32
from vispe.encodings.base import Additive
from vispe.errors import OptionError, ShapeError
from vispe.grid import Positions
from vispe.utils.options import Axes, PositiveInt
from vispe.utils.parameters import parameters_of

FRACTIONS = "reads fractions of the field"


class CoordinateEncoder(Additive):
    """Additive encoding of each token's coordinates; subclasses define their range and `_encode`."""

    ndim = (1, 2, 3)

    dim: PositiveInt
    grid: tuple[PositiveInt, ...] | None = None
    axes: Axes | None = None

    def __post_init__(self) -> None:
        self.coordinates = coordinate_count(self.name, self.axes, self.grid)
        self._accept(self.coordinates)

    def encode(self, coords: Tensor) -> Tensor:
        """Return the encoding (..., d) of arbitrary coordinates (..., axes), in float32 or better.

        Raises:
            ShapeError: the number of coordinates differs from the number of axes, or they are not floats.
        """
        if coords.ndim < 1 or coords.shape[-1] != self.coordinates or not coords.is_floating_point():
            raise ShapeError(
                f"{self.name} needs floating-point coordinates (..., {self.coordinates}), got "
                f"{tuple(coords.shape)} {coords.dtype}."
            )
        return self._encode(at_least_float32(coords), None)

    def table(self, pos: Positions, image: Tensor | None = None) -> Tensor:
        """Return the encoding of every token, (1 or b, n, d) in float32 or better, 0 for prefix tokens."""
        self._need_axes(pos)
        if self.constant():
            return pos.remember((self.name, self.config_key), lambda: self._table(pos))
        return self._table(pos)

    def constant(self) -> bool:
        """Whether the table depends only on positions, so that it can be cached with them."""
        return not parameters_of(self) and next(self.buffers(), None) is None

    def place(self, pos: Positions) -> Tensor:
        """Return the coordinates that `table` encodes, (1 or b, n, axes)."""
        raise NotImplementedError

    def _table(self, pos: Positions) -> Tensor:
        return self._encode(self.place(pos), pos) * pos.spatial[..., None]

    def _encode(self, coords: Tensor, pos: Positions | None) -> Tensor:
        raise NotImplementedError


class FieldEncoder(CoordinateEncoder):
    """Coordinate encoder with coordinates as fractions of the field of view, or unscaled."""

    normalize: bool = True

    def place(self, pos: Positions) -> Tensor:
        """Return the coordinates that `table` encodes, (1 or b, n, axes).

        With `normalize`, those of a grid are its cell centres as fractions of the field, in (0, 1), so that
        grids of all sizes cover the same range; free coordinates are divided by `Positions.extent`.
        """
        if not self.normalize:
            return pos.coords
        self._need_start(pos, FRACTIONS)
        # on a grid of n cells: from 0.5 / n to 1 - 0.5 / n
        return cell_centres(pos) / pos.extent[:, None]


def cell_centres(pos: Positions) -> Tensor:
    """Return the positions of tokens relative to the border of the field; on a grid, the centres of their cells.

    Tokens moved by a sampler still have a cell; tokens without a grid are at their coordinates. Positions joined from
    several grids are relative to the corner of their common field.
    """
    if "corner" in pos.attrs:
        # joined grids have cells of several sizes: relative to the corner of their common field
        return (pos.coords - pos.attrs["corner"][:, None]) * pos.spatial[..., None]
    # free coordinates have no cells and are returned unchanged
    centred = pos.grid is not None or "sampled" in pos.attrs
    return pos.coords + pos.cell[:, None] / 2 if centred else pos.coords


def coordinate_count(name: str, axes: int | None, grid: tuple[int, ...] | None) -> int:
    """Return the number of coordinates: `axes`, else that of the grid, else 2."""
    if axes is not None and grid is not None and len(grid) != axes:
        raise OptionError(
            f"{name} needs axes={len(grid)} for the grid {tuple(grid)} of the model, got axes={axes}. Omit axes."
        )
    return axes or (2 if grid is None else len(grid))


def exact_device(like: Tensor) -> torch.device:
    """Return a device with float64: the tensor's device, or the CPU."""
    # MPS has no float64
    return torch.device("cpu") if like.device.type == "mps" else like.device


def padded(features: Tensor, dim: int) -> Tensor:
    """Return features zero-padded to `dim` channels."""
    return torch.nn.functional.pad(features, (0, dim - features.shape[-1]))
