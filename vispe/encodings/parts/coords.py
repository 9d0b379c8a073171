"""Encoders of continuous coordinates: the range of the coordinates, and how they become a table."""

from __future__ import annotations

import torch
from torch import Tensor

from vispe.attention.precision import at_least_float32
from vispe.encodings.base import Additive
from vispe.errors import OptionError, ShapeError
from vispe.grid import Positions
from vispe.options import Axes, Whole

FRACTIONS = "reads fractions of the field"


class CoordinateEncoder(Additive):
    """Encodes every token's coordinates on their own; classes say from which range they are, and how, by `_encode`."""

    ndim = (1, 2, 3)

    dim: Whole
    grid: tuple[Whole, ...] | None = None
    axes: Axes | None = None

    def __post_init__(self) -> None:
        self.coordinates = coordinate_count(self.name, self.axes, self.grid)
        self._accept(self.coordinates)

    def encode(self, coords: Tensor) -> Tensor:
        """Return the encoding (..., d) of free coordinates (..., axes), in float32 or better.

        Raises:
            ShapeError: there are more or fewer coordinates than axes.
        """
        if coords.ndim < 1 or coords.shape[-1] != self.coordinates or not coords.is_floating_point():
            raise ShapeError(
                f"{self.name} encodes floating-point coordinates (..., {self.coordinates}), got "
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
        """Whether the table depends on positions alone, so that it may be kept with them."""
        return next(self.parameters(), None) is None and next(self.buffers(), None) is None

    def place(self, pos: Positions) -> Tensor:
        """Return the coordinates that `table` encodes, (1 or b, n, axes)."""
        raise NotImplementedError

    def _table(self, pos: Positions) -> Tensor:
        return self._encode(self.place(pos), pos) * pos.spatial[..., None]

    def _encode(self, coords: Tensor, pos: Positions | None) -> Tensor:
        raise NotImplementedError


class FieldEncoder(CoordinateEncoder):
    """Reads coordinates as fractions of the field of view, or as they are."""

    normalize: bool = True

    def place(self, pos: Positions) -> Tensor:
        """Return the coordinates that `table` encodes, (1 or b, n, axes).

        With `normalize` those of a grid are the centres of its cells as fractions of the field, in (0, 1), so that
        grids of all sizes cover the same range; free coordinates are divided by `Positions.extent`.
        """
        if not self.normalize:
            return pos.coords
        self._need_start(pos, FRACTIONS)
        return cell_centres(pos) / pos.extent[:, None]


def cell_centres(pos: Positions) -> Tensor:
    """Return where tokens stand, counted from the border of the field: those of a grid in the centres of their cells.

    Tokens that a sampler has moved still have a cell; others, without a grid, are where their coordinates are.
    """
    placed = pos.grid is not None or "sampled" in pos.attrs
    return pos.coords + pos.cell[:, None] / 2 if placed else pos.coords


def coordinate_count(name: str, axes: int | None, grid: tuple[int, ...] | None) -> int:
    """Return the number of coordinates: as asked, else that of the grid, else 2."""
    if axes is not None and grid is not None and len(grid) != axes:
        raise OptionError(
            f"{name} was asked for axes={axes}, but the grid of the model is {tuple(grid)}; leave axes out."
        )
    return axes or (2 if grid is None else len(grid))


def exact_device(like: Tensor) -> torch.device:
    """Return where float64 exists: the tensor's device, or the CPU for devices without it."""
    return torch.device("cpu") if like.device.type == "mps" else like.device


def padded(features: Tensor, dim: int) -> Tensor:
    """Return features with zeros behind them up to `dim` channels."""
    return torch.nn.functional.pad(features, (0, dim - features.shape[-1]))
