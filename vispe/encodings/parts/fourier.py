"""Bands of waves that open while a model is trained; the ranges of coordinates that Fourier features read."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from torch import Tensor

from vispe.encodings.base import Encoding
from vispe.encodings.parts.coords import FRACTIONS, CoordinateEncoder, cell_centres
from vispe.encodings.parts.resample import training_grid
from vispe.errors import ShapeError
from vispe.grid import Positions
from vispe.options import Whole

Normalize = Literal["field", "common", "reference", "corners", "none"]
Reveal = Literal["none", "linear", "cosine"]


def bands_open(count: int, progress: float | Tensor, form: Reveal = "linear") -> Tensor:
    """Return how far each of `count` bands is open, (count,) float64 in [0, 1], that of the longest waves first.

    Band k opens while ``progress * count`` goes from k to k + 1: linearly, or along half a cosine. At the end of the
    training, progress 1, all are exactly 1.

    Example:
        >>> bands_open(4, 0.625).tolist()
        [1.0, 1.0, 0.5, 0.0]
    """
    share = torch.as_tensor(progress, dtype=torch.float64)
    opened = (share * count - torch.arange(count, dtype=torch.float64, device=share.device)).clamp(0, 1)
    return (1 - (math.pi * opened).cos()) / 2 if form == "cosine" else opened


class Revealed(Encoding):
    """Has waves in bands, which `reveal` opens with `progress`, one after the other (PINs, arXiv 2202.04713).

    Progress is kept as a tensor beside the number: compiled code reads another value without being compiled anew.
    """

    reveal: Reveal = "none"
    _share: ClassVar[Tensor | None] = None

    @property
    def progress(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Share of the training that is done, see `set_progress`; 1 = all of it."""
        return 1.0 if self._share is None else float(self._share)

    @progress.setter
    def progress(self, value: float) -> None:
        vars(self)["_share"] = torch.tensor(value, dtype=torch.float64, device="cpu")

    @property
    def opening(self) -> bool:
        """Whether the training has said how far it is, and `reveal` asks for it: tables then change with it."""
        return self.reveal != "none" and self._share is not None

    def opened(self, waves: Tensor, *counts: int, copies: int = 1, interleaved: bool = False) -> Tensor:
        """Return waves (..., channels) with each band times how far it is open.

        Args:
            waves: in runs, one for each of `counts`: the sines of so many frequencies, shortest waves first, then their
                cosines.
            counts: bands of each run.
            copies: how often all runs are repeated.
            interleaved: a run has the sine and the cosine of a frequency side by side.
        """
        share = self._share
        if self.reveal == "none" or share is None:
            return waves
        # bands are counted from the longest waves
        gates = [bands_open(n, share, self.reveal).flip(0) for n in counts]
        both = [g.repeat_interleave(2) if interleaved else g.repeat(2) for g in gates]
        return waves * torch.cat(both * copies).to(waves)


class FourierEncoding(Revealed, CoordinateEncoder):
    """Encodes coordinates of one of several ranges by waves; `fourier` and `fourier_learned` say which."""

    normalize: Normalize = "field"
    reference: tuple[Whole, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        used = self.normalize == "reference"
        self.reference = training_grid(
            self.reference, self.coordinates, used, f"normalize={self.normalize!r}"
        )

    def constant(self) -> bool:
        """Whether the table depends on positions alone."""
        return not self.opening and super().constant()

    def by_length(self, waves: Tensor, bands: Tensor, count: int) -> Tensor:
        """Return waves (..., 2 r), two halves of r frequencies, times how far the band (r,) of each is open."""
        share = self._share
        if self.reveal == "none" or share is None:
            return waves
        gates = bands_open(count, share, self.reveal).to(waves)[bands]
        return waves * torch.cat([gates, gates])

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
