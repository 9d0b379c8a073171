"""What `fourier` and `fourier_learned` share: from which range their coordinates are, and how tables are made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from vispe.attention.precision import at_least_float32
from vispe.encodings.base import Additive
from vispe.encodings.parts.regrid import training_grid
from vispe.errors import OptionError, ShapeError, is_whole
from vispe.grid import Positions

Normalize = Literal["field", "common", "reference", "corners", "none"]


class FourierEncoding(Additive):
    """Encodes every token's coordinates on their own; final classes say how, by `_encode`.

    Args:
        dim: width of the tokens, d.
        axes: number of coordinates; that of `grid` by default, 2 without it.
        grid: shape of the host's grid.
        normalize: which range the coordinates of `table` have.
        reference: the training grid of normalize='reference'.
    """

    def __init__(
        self,
        dim: int,
        axes: int | None,
        grid: Sequence[int] | None,
        normalize: str,
        reference: Sequence[int] | None,
        most: int = 3,
    ) -> None:
        super().__init__()
        if not is_whole(dim) or dim < 1:
            raise OptionError(f"{self.name} needs a width above 0, got dim={dim!r}.")
        if axes is not None and not (is_whole(axes) and 1 <= axes <= most):
            raise OptionError(f"{self.name} reads 1 to {most} coordinates, got axes={axes!r}.")
        if axes is not None and grid is not None and len(grid) != axes:
            raise OptionError(
                f"{self.name} was asked for axes={axes}, but the grid of the model is {tuple(grid)}; leave axes out."
            )
        if normalize not in get_args(Normalize):
            raise OptionError(
                f"normalize must be one of {', '.join(get_args(Normalize))}, got {normalize!r}."
            )
        self.dim, self.axes, self.normalize = dim, axes, normalize
        self.grid = None if grid is None else tuple(grid)
        self.coordinates = axes or (2 if grid is None else len(grid))
        used = normalize == "reference"
        self.reference = training_grid(reference, self.coordinates, used, f"normalize={normalize!r}")
        self.ndim = (self.coordinates,)  # pyright: ignore[reportAttributeAccessIssue]  one of what the class accepts

    def encode(self, coords: Tensor) -> Tensor:
        """Return the encoding (..., d) of free coordinates (..., axes), in float32 or better, taken as they are.

        Raises:
            ShapeError: there are more or fewer coordinates than axes.
        """
        if coords.ndim < 1 or coords.shape[-1] != self.coordinates or not coords.is_floating_point():
            raise ShapeError(
                f"{self.name} encodes floating-point coordinates (..., {self.coordinates}), got "
                f"{tuple(coords.shape)} {coords.dtype}."
            )
        return self._encode(at_least_float32(coords))

    def table(self, pos: Positions, image: Tensor | None = None) -> Tensor:
        """Return the encoding of every token, (1 or b, n, d) in float32 or better, 0 for prefix tokens."""
        if pos.axes not in self.ndim:
            raise ShapeError(f"{self.name} needs {self.coordinates} axes, got {pos.axes} ({pos}).")
        if next(self.parameters(), None) is None and next(self.buffers(), None) is None:
            return pos.remember((self.name, repr(self.config)), lambda: self._table(pos))
        return self._table(pos)

    def place(self, pos: Positions) -> Tensor:
        """Return the coordinates that `table` encodes, (1 or b, n, axes), see `normalize`.

        The tokens of a grid stand in the centres of their cells; free coordinates are where they are.
        """
        if self.normalize == "none":
            return pos.coords
        if self.normalize == "corners":  # of one cell: the first end
            last = (pos.extent - pos.cell)[:, None]
            return pos.coords / last.clamp(min=1e-30) * 2 - 1
        centres = pos.coords if pos.grid is None else pos.coords + pos.cell[:, None] / 2
        if self.normalize == "field":
            return centres / pos.extent[:, None]
        if self.normalize == "common":
            return centres / pos.extent.amax(1)[:, None, None]
        host = (pos.grid.reference or self.grid or pos.grid.shape) if pos.grid else self.grid
        shape = self.reference or host
        if shape is None or len(shape) != pos.axes:
            raise ShapeError(
                f"{self.name} with normalize='reference' needs the shape of the training grid, got {pos}; build it "
                "with reference=..., or give Grid(..., reference=...)."
            )
        return centres / max(shape)

    def _table(self, pos: Positions) -> Tensor:
        return self._encode(self.place(pos)) * pos.spatial[..., None]

    def _encode(self, coords: Tensor) -> Tensor:
        raise NotImplementedError


def check_features(name: str, features: object) -> None:
    """Raise unless `features` is an even number above 0, or None."""
    if features is None:
        return
    if not isinstance(features, int) or isinstance(features, bool) or features < 2 or features % 2:
        raise OptionError(f"{name} needs an even number of features, got features={features!r}.")


def with_first(table: Tensor, vector: Tensor, pos: Positions) -> Tensor:
    """Return a table (1 or b, n, d) with `vector` (1, d) for the first token, if that is a prefix token."""
    first = ~pos.spatial[..., None]
    first = first & (torch.arange(pos.tokens, device=table.device) == 0)[:, None]
    return table + first * vector.to(table.dtype)
