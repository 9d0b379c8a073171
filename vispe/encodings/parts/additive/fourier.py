"""Progressive frequency bands (coarse to fine), and coordinate ranges of Fourier features."""

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
from vispe.utils.options import PositiveInt

Normalize = Literal["field", "common", "reference", "corners", "none"]
Reveal = Literal["none", "linear", "cosine"]


def band_weights(count: int, progress: float | Tensor, form: Reveal = "linear") -> Tensor:
    """Return the weights of `count` bands, (count,) float64 in [0, 1], longest wavelengths first.

    The weight of band k grows from 0 to 1 while ``progress * count`` goes from k to k + 1, linearly or along half a
    cosine. At the end of training, progress 1, all weights are exactly 1.

    Example:
        >>> band_weights(4, 0.625).tolist()
        [1.0, 1.0, 0.5, 0.0]
    """
    share = torch.as_tensor(progress, dtype=torch.float64)
    # complete bands have weight 1, the current one a fraction, later ones 0
    opened = (share * count - torch.arange(count, dtype=torch.float64, device=share.device)).clamp(0, 1)
    return (1 - (math.pi * opened).cos()) / 2 if form == "cosine" else opened


class ProgressiveBands(Encoding):
    """Encoding with frequency bands that `reveal` activates one after the other with `progress` (PINs, 2202.04713).

    Progress is stored as a tensor, so that compiled code reads new values without recompilation.
    """

    reveal: Reveal = "none"
    _share: ClassVar[Tensor | None] = None

    @property
    def progress(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Completed fraction of the training, see `set_progress`."""
        return 1.0 if self._share is None else float(self._share)

    @progress.setter
    def progress(self, value: float) -> None:
        vars(self)["_share"] = torch.tensor(value, dtype=torch.float64, device="cpu")

    @property
    def uses_progress(self) -> bool:
        """Whether tables depend on the training progress: `reveal` is set and `set_progress` was called."""
        return self.reveal != "none" and self._share is not None

    def with_band_weights(
        self, waves: Tensor, *counts: int, copies: int = 1, interleaved: bool = False
    ) -> Tensor:
        """Return waves (..., channels) with each band multiplied by its weight.

        Args:
            waves: in groups, one for each of `counts`: the sines of that many frequencies, shortest wavelengths first,
                then their cosines.
            counts: bands of each group.
            copies: number of repetitions of all groups.
            interleaved: sine and cosine of a frequency are adjacent.
        """
        share = self._share
        if self.reveal == "none" or share is None:
            return waves
        # bands are ordered from the longest wavelength
        gates = [band_weights(n, share, self.reveal).flip(0) for n in counts]
        # the sine and the cosine of a band have the same weight
        both = [g.repeat_interleave(2) if interleaved else g.repeat(2) for g in gates]
        return waves * torch.cat(both * copies).to(waves)


class FourierEncoding(ProgressiveBands, CoordinateEncoder):
    """Encodes normalised coordinates by sines and cosines; base of `fourier` and `fourier_learned`."""

    normalize: Normalize = "field"
    reference: tuple[PositiveInt, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        used = self.normalize == "reference"
        self.reference = training_grid(
            self.reference, self.coordinates, used, f"normalize={self.normalize!r}"
        )

    def constant(self) -> bool:
        """Whether the table depends only on positions."""
        return not self.uses_progress and super().constant()

    def by_length(self, waves: Tensor, bands: Tensor, count: int) -> Tensor:
        """Return waves (..., 2 r), two halves of r frequencies, times the weight of each frequency's band (r,)."""
        share = self._share
        if self.reveal == "none" or share is None:
            return waves
        gates = band_weights(count, share, self.reveal).to(waves)[bands]
        return waves * torch.cat([gates, gates])

    def place(self, pos: Positions) -> Tensor:
        """Return the coordinates that `table` encodes, (1 or b, n, axes), see `normalize`.

        Tokens of a grid are at the centres of their cells; free coordinates are unchanged.
        """
        if self.normalize == "none":
            return pos.coords
        self._need_start(pos, FRACTIONS)
        if self.normalize == "corners":  # -1 for a single cell
            last = (pos.extent - pos.cell)[:, None]
            coords = cell_centres(pos) - pos.cell[:, None] / 2 if "corner" in pos.attrs else pos.coords
            return coords / last.clamp(min=1e-30) * 2 - 1
        centres = cell_centres(pos)
        if self.normalize == "field":
            return centres / pos.extent[:, None]
        if self.normalize == "common":
            # relative to the longest axis, which preserves the aspect ratio
            return centres / pos.extent.amax(1)[:, None, None]
        host = (pos.grid.reference or self.grid or pos.grid.shape) if pos.grid else self.grid
        shape = self.reference or host
        if shape is None or len(shape) != pos.axes:
            raise ShapeError(
                f"{self.name} with normalize='reference' needs the shape of the training grid, got {pos}. Pass "
                "reference=..., or use Grid(..., reference=...)."
            )
        return centres / max(shape)


def with_first(table: Tensor, vector: Tensor, pos: Positions) -> Tensor:
    """Return a table (1 or b, n, d) with `vector` (1, d) added to the first token if it is a prefix token."""
    first = ~pos.spatial[..., None]
    first = first & (torch.arange(pos.tokens, device=table.device) == 0)[:, None]
    return table + first * vector.to(table.dtype)
