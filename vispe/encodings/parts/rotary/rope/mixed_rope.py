"""Angles of frequencies in all directions of the grid, for `rope_mixed` and its relatives."""

from __future__ import annotations

from torch import Tensor

from vispe.attention.precision import at_least_float32
from vispe.encodings.parts.rotary.rope.rope_base import RopeBase
from vispe.errors import OptionError
from vispe.grid import Positions
from vispe.grid.grid_frequencies import grid_frequencies


class MixedRope(RopeBase):
    """Rotates each pair of channels by the product of the coordinates with a frequency vector, per head and block.

    Subclasses define `frequencies`.
    """

    learned = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schedule == "ntk":
            raise OptionError(
                f"schedule='ntk' needs frequencies in order, but those of {self.name} are learned. Choose 'yarn'."
            )

    @property
    def per_layer(self) -> bool:
        """Every block has its own frequencies."""
        return True

    def frequencies(self) -> Tensor:
        """Return the frequency vector of every pair (axes, h, pairs), last axis (x) first, in radians per patch."""
        raise NotImplementedError

    def _angles(self, pos: Positions, layer: int) -> Tensor:
        coords = self._augmented(pos.coords, pos.cell, pos, layer)
        freqs = at_least_float32(self.frequencies()).flip(0)  # axes in the order of the positions
        scaled = [freqs[i][None] for i in range(len(freqs))]  # (1, h, pairs) each
        if self.schedule != "none":
            now, trained = self._sizes(pos)
            scaled = [
                grid_frequencies(
                    f,
                    self.schedule,
                    (now[:, i] / trained[i])[:, None],
                    (trained[i] * pos.cell[:, i])[:, None],
                    cell=pos.cell[:, i, None],
                )
                for i, f in enumerate(scaled)
            ]
        # elementwise products: autocast would round a matrix product; the last axis comes first, as in the reference
        angle = coords[:, None, :, -1, None] * scaled[-1][:, :, None]
        for i in reversed(range(len(freqs) - 1)):
            angle = angle + coords[:, None, :, i, None] * scaled[i][:, :, None]
        return angle
