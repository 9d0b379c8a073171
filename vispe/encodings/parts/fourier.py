"""The ranges of coordinates that `fourier` and `fourier_learned` read, and a vector for the class token."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from vispe.encodings.parts.coords import FRACTIONS, CoordinateEncoder, cell_centres
from vispe.encodings.parts.regrid import training_grid
from vispe.errors import ShapeError
from vispe.grid import Positions
from vispe.options import Whole

Normalize = Literal["field", "common", "reference", "corners", "none"]


class FourierEncoding(CoordinateEncoder):
    """Encodes coordinates of one of several ranges by waves; `fourier` and `fourier_learned` say which."""

    normalize: Normalize = "field"
    reference: tuple[Whole, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        used = self.normalize == "reference"
        self.reference = training_grid(
            self.reference, self.coordinates, used, f"normalize={self.normalize!r}"
        )

    def place(self, pos: Positions) -> Tensor:
        """Return the coordinates that `table` encodes, (1 or b, n, axes), see `normalize`.

        The tokens of a grid stand in the centres of their cells; free coordinates are where they are.
        """
        if self.normalize == "none":
            return pos.coords
        self._need_start(pos, FRACTIONS)
        if self.normalize == "corners":  # of one cell: the first end
            last = (pos.extent - pos.cell)[:, None]
            return pos.coords / last.clamp(min=1e-30) * 2 - 1
        centres = cell_centres(pos)
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


def with_first(table: Tensor, vector: Tensor, pos: Positions) -> Tensor:
    """Return a table (1 or b, n, d) with `vector` (1, d) for the first token, if that is a prefix token."""
    first = ~pos.spatial[..., None]
    first = first & (torch.arange(pos.tokens, device=table.device) == 0)[:, None]
    return table + first * vector.to(table.dtype)
